"""The names of published Delta Attention checkpoints, and back.

The authors' code keeps, per layer and per branch (`attn`, then `mlp`), the query as a linear layer and the key norm as a
norm beside the layer's own modules:

    model.layers.<l>.attn_res_proj.weight [1, D]    residual.<stream>.<site>.query [D]
    model.layers.<l>.attn_res_norm.weight [D]       residual.<stream>.<site>.key_norm [D]

A layer is the module whose two adds are the sites, so any model with an attention and an MLP add per layer has such names.
Where a read has one source only (the first one), query and key norm change nothing: resfx has no parameters there, the
published files do. They are dropped one way and filled with their start (0 and 1) on the way back.

    model = resfx.rewrite(qwen3, resfx.DeltaAttention(), (tokens,))
    model.load_state_dict(resfx.published_to_residual(state_dict, model))
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from resfx.passes import Plan
from resfx.passes.delta_attention import DeltaAttention
from resfx.patterns import ResfxError, Site, Stream
from resfx.revert import require_rewritten
from resfx.rewritten import Rewritten

_BRANCHES = ("attn", "mlp")
_PUBLISHED = re.compile(r"(?P<place>.+\.(?:attn|mlp))_res_(?P<kind>proj|norm)\.weight")
_OURS = {"proj": "query", "norm": "key_norm"}


class PublishedNameError(ResfxError):
    """A checkpoint and a model that don't fit each other, or a model that has no published names."""


def published_to_residual(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A published state_dict under the names of `model`, which was rewritten to DeltaAttention; ready for load_state_dict.

    All other names stay, and no number changes. `model` is not changed.
    Errors: NotRewritten; PublishedNameError for a name without a site, a site without a name, a shape that doesn't fit.
    """
    own = require_rewritten(model, "given published names")
    places = _places(own)
    parameters = _residual_parameters(own)
    converted: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        match = _PUBLISHED.fullmatch(name)
        if match is None:
            converted[name] = tensor
            continue
        if match["place"] not in places:
            raise PublishedNameError(
                f"{name} belongs to no site of the model, whose layers are {_layers(places)}: "
                "rewrite a model of the checkpoint's own configuration"
            )
        ours = f"{places[match['place']]}.{_OURS[match['kind']]}"
        if ours in parameters:
            converted[ours] = _shaped(name, tensor, parameters[ours])
    absent = [name for name in parameters if name not in converted]
    if absent:
        raise PublishedNameError(
            f"the checkpoint has nothing for {', '.join(absent[:5])}: rewrite a model of the checkpoint's own configuration"
        )
    return converted


def residual_to_published(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of `model`, which was rewritten to DeltaAttention, under the published names.

    The tensors are the model's own (the queries as views [1, D]), detached, as in `state_dict()`.
    Errors: NotRewritten, PublishedNameError.
    """
    own = require_rewritten(model, "given published names")
    places = _places(own)
    state = own.state_dict()
    published = {name: tensor for name, tensor in state.items() if not name.startswith("residual.")}
    for place, ours in places.items():
        query, key_norm = state.get(f"{ours}.query"), state.get(f"{ours}.key_norm")
        if query is None or key_norm is None:
            query, key_norm = _start(own, int(ours.split(".")[1]))
        published[f"{place}_res_proj.weight"] = query.unsqueeze(0)
        published[f"{place}_res_norm.weight"] = key_norm
    return published


def _places(model: Rewritten) -> dict[str, str]:
    """`model.layers.<l>.attn` -> `residual.<stream>.<site>`, for every site. Errors: PublishedNameError."""
    places: dict[str, str] = {}
    for plan in model.origin.plans:
        _require_published_form(plan)
        for path, sites in _by_layer(plan.stream).items():
            if len(sites) != len(_BRANCHES):
                raise PublishedNameError(
                    f"module `{path}` has {len(sites)} sites ({', '.join(site.source for site in sites)}); "
                    "published names exist where a layer has two, attention and MLP"
                )
            for branch, site in zip(_BRANCHES, sites, strict=True):
                places[f"{path}.{branch}"] = f"residual.{plan.stream.index}.{site.index}"
    known = {f"{ours}.{name}" for ours in places.values() for name in _OURS.values()}
    other = [name for name in _residual_parameters(model) if name not in known]
    if other:
        raise PublishedNameError(
            f"{other[0]} has no published name: only query and key_norm have; "
            "rewrite without gate, null_source, tied and warm_start"
        )
    return places


def _require_published_form(plan: Plan) -> None:
    if not isinstance(plan.form, DeltaAttention):
        raise PublishedNameError(
            f"stream {plan.stream.index} is rewritten to {plan.form.to_spec()}; published names exist for DeltaAttention"
        )
    plain = [site for site in plan.stream.sites if plan.select is not None and not plan.select(site)]
    if plain:
        raise PublishedNameError(
            f"site {plain[0].index} of stream {plan.stream.index} ({plain[0].path}) was left out by select=; "
            "the published code routes every site"
        )


def _by_layer(stream: Stream) -> dict[str, list[Site]]:
    layers: dict[str, list[Site]] = defaultdict(list)
    for site in stream.sites:
        layers[site.path].append(site)
    return layers


def _layers(places: Mapping[str, str]) -> str:
    layers = list(dict.fromkeys(place.rpartition(".")[0] for place in places))
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}"


def _residual_parameters(model: Rewritten) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if name.startswith("residual.")}


def _shaped(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    flat = tensor.squeeze(0) if tensor.dim() == 2 else tensor
    if flat.shape != like.shape:
        raise PublishedNameError(
            f"{name} has shape {tuple(tensor.shape)}, the model's has {tuple(like.shape)}: "
            "rewrite a model of the checkpoint's own configuration"
        )
    return flat


def _start(model: Rewritten, stream: int) -> tuple[Tensor, Tensor]:
    """Query and key norm at their start, like those of the stream's other sites."""
    siblings = [value for name, value in model.named_parameters() if name.startswith(f"residual.{stream}.")]
    like = siblings[0] if siblings else next(p for p in model.parameters() if p.is_floating_point())
    found = model.residual_map.streams[stream]
    assert found.axis is not None  # a stream without one can't take the form
    size = found.shape[found.axis]
    assert isinstance(size, int)  # parameters of that size were made
    return torch.zeros(size, dtype=like.dtype, device=like.device), torch.ones(
        size, dtype=like.dtype, device=like.device
    )
