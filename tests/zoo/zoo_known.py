"""What the zoo's models do not pass, by step, with a piece of the reason: refusals, and answers in which the table is not ours.

A model that is not here passes every step.
"""

from __future__ import annotations


def _train(reason: str) -> dict[str, str]:
    return {"delta.train": reason, "multigate.train": reason}


def _rewrite(reason: str) -> dict[str, str]:
    return {"delta.rewrite": reason, "multigate.rewrite": reason}


# LayerDrop: Python control flow on a random number, in the code that holds the stream, while the model trains.
_LAYER_DROP = _train("train mode does not trace")


KNOWN: dict[str, dict[str, str]] = {
    # The last layer's sum of the layout stream reaches no output: torch.export drops it, and there is nothing to rewrite. The one
    # before it reaches none either, stays in the graph for its dropout, and is left plain.
    "enc/lilt": {
        "sites": "7 for 8",
        "branches": "7 for 8",
        "lines": "modeling_lilt.py",
    },
    # The encoder reads from its mask whether there are global tokens, and tells its attention.
    "enc/longformer": {"delta.rewrite": "can't be traced", "multigate.rewrite": "can't be traced"},
    "s2s/m2m_100": _LAYER_DROP,
    "s2s/nllb-moe": _LAYER_DROP,
    # As in lilt: the last sum of the global tokens reaches no output.
    "s2s/pegasus_x": {"sites": "13 for 14", "branches": "13 for 14", "lines": "modeling_pegasus_x.py"},
    "s2s/seamless_m4t_t2t": _LAYER_DROP,
    # Deformable attention reads no query at either point: its weights start at zero, and woken ones look outside of a 2x2 map.
    "vis/deformable_detr": {**_LAYER_DROP, "multigate.parameters": "2 of 33 change nothing"},
    "vis/conditional_detr": _LAYER_DROP,
    "vis/detr": _LAYER_DROP,
    "vis/mask2former": _LAYER_DROP,
    "vis/rt_detr": _LAYER_DROP,
    "vis/table-transformer": _LAYER_DROP,
    # Its integer activations follow the range of what they see while they train, in Python.
    "enc/ibert": _train("train mode does not trace"),
    # A state for the next call is returned in eval mode only.
    "enc/xlnet": _train("another structure in train mode"),
    # Some of its layers have their weights scaled in eval mode, and are called otherwise there.
    "rwkv": _train("is called in one mode only"),
    # A reversible coupling; its inverse would no longer exist.
    "enc/reformer": _rewrite("reversible coupling"),
    # The state passes a stochastic depth and another step that both follow the mode.
    "vis/cvt": _rewrite("several steps on the state"),
    # Its root sorts boxes by their values, and no part of it (a VGG) has a residual connection: the map would not be of the whole model.
    "tv/det_ssd300_vgg16": {
        "capture": "GuardOnDataDependentSymNode",
        **_rewrite("GuardOnDataDependentSymNode"),
    },
    # The table's streams leave out sites on a slice, and these have no other: one a stage is right.
    "timm/dpn48b": {"streams": "4 for 0"},
    "timm/dpn68": {"streams": "4 for 0"},
}
