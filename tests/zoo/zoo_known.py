"""What the zoo's models do not pass, by step, with a piece of the reason: refusals, and answers in which the table is not ours.

A model that is not here passes every step.
"""

from __future__ import annotations

# LayerDrop: Python control flow on a random number, in the code that holds the stream, while the model trains.
_LAYER_DROP = {"delta.train": "train mode does not trace", "multigate.train": "train mode does not trace"}

KNOWN: dict[str, dict[str, str]] = {
    # The last layer's sum of the layout stream reaches no output: torch.export drops it, and there is nothing to rewrite. The one
    # before it reaches none either, and stays for its dropout: MultiGate's parameters there are refused, an open fault of ours.
    "enc/lilt": {
        "sites": "7 for 8",
        "branches": "7 for 8",
        "lines": "modeling_lilt.py",
        "multigate.rewrite": "no output depends on this parameter",
    },
    # The encoder reads from its mask whether there are global tokens, and tells its attention.
    "enc/longformer": {"delta.rewrite": "can't be traced", "multigate.rewrite": "can't be traced"},
    "s2s/m2m_100": _LAYER_DROP,
    "s2s/nllb-moe": _LAYER_DROP,
    # As in lilt: the last sum of the global tokens reaches no output.
    "s2s/pegasus_x": {"sites": "13 for 14", "branches": "13 for 14", "lines": "modeling_pegasus_x.py"},
    "s2s/seamless_m4t_t2t": _LAYER_DROP,
}
