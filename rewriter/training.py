"""Parameter groups for training a rewritten model: plain lists of dicts for any torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from resfx.live import attachment_of
from resfx.passes.parameters import ParameterTree
from resfx.patterns import ResfxError
from resfx.rewritten import Rewritten

Groups = list[dict[str, Any]]


class TrainingError(ResfxError):
    """The model has nothing to train as asked."""


def parameter_groups(
    model: nn.Module,
    lr: float,
    residual_lr: float | None = None,
    weight_decay: float = 0.1,
    *,
    freeze_base: bool = False,
) -> Groups:
    """The trainable parameters of `model` in groups with `params`, `lr`, `weight_decay` and `name`.

        optimizer = torch.optim.AdamW(resfx.parameter_groups(model, lr=3e-4, residual_lr=1e-3))

    Each group has its own `weight_decay`, so that the optimizer's argument of that name reaches none: give it here.

    Every parameter with `requires_grad` is in exactly one group, a shared one once; empty groups are left out.

    - "residual": what a rewrite added, at `residual_lr` (`lr` where it is None), without decay: queries, key norms, gates, biases,
      lam. Decay would pull a query towards equal weights and a gate towards one half, whatever the data say.
    - "base, decay": all other matrices and kernels (two or more axes longer than 1) that are no embedding table.
    - "base, no decay": vectors, norms, biases, and tables: a table's row has a gradient only where its token occurs, but would
      shrink with every step.

    ScaledLoop: the branches of a stream that it scales by e = lam / (N sqrt(L)) are in groups of their own, at `lr / sqrt(L)`, L the
    stream's distinct branches. The rate depends on L alone: N, the loops, is in e already, so `lr` is found once, with few loops (and
    is the rate itself where L = 1). N L executions that each move by e times the rate move the output by lam sqrt(L) times the rate;
    1 / sqrt(L) keeps that move the same at every depth. It holds for optimizers whose step does not grow with the gradient (Adam, Lion,
    Muon). A warm start (e = 1) and its lam are left at `lr` and `residual_lr`. Source: arXiv 2606.18524.

    `freeze_base=True` sets `requires_grad` of everything but the residual parameters to False (LoRA's too) and returns "residual".
    Any module will do, also one that holds rewritten models; in a plain one all is base. Errors: TrainingError where nothing is left.
    """
    residual = {id(p) for tree in model.modules() if isinstance(tree, ParameterTree) for p in tree.parameters()}
    if freeze_base:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in residual)
    tables = {
        id(p)
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        for p in m.parameters(recurse=False)
    }
    factors = _factors(model)
    groups: dict[str, dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in residual:
            name, rate, decay = "residual", lr if residual_lr is None else residual_lr, 0.0
        else:
            decays = id(parameter) not in tables and _is_matrix(parameter)
            factor = factors.get(id(parameter), 1.0)
            name = ("base, decay" if decays else "base, no decay") + ("" if factor == 1 else f", lr * {factor:.4g}")
            rate, decay = lr * factor, weight_decay if decays else 0.0
        group = groups.setdefault(name, {"params": [], "lr": rate, "weight_decay": decay, "name": name})
        group["params"].append(parameter)
    if not groups:
        raise TrainingError(_nothing(freeze_base, bool(residual)))
    return list(groups.values())


def _is_matrix(parameter: nn.Parameter) -> bool:
    return sum(size > 1 for size in parameter.shape) >= 2


def _nothing(freeze_base: bool, has_residual: bool) -> str:
    if freeze_base and not has_residual:
        return "freeze_base=True leaves nothing to train: no form has added parameters to this model"
    return "the model has no trainable parameter: set requires_grad of those that you want to train"


def _factors(model: nn.Module) -> dict[int, float]:
    """What the learning rate is multiplied by, for the parameters where a form says so; the smallest where several do."""
    factors: dict[int, float] = {}
    for module in model.modules():
        for factor, names in _scaled_branches(module):
            for parameter in _branch_parameters(module, names):
                factors[id(parameter)] = min(factor, factors.get(id(parameter), factor))
    return factors


def _scaled_branches(module: nn.Module) -> Iterator[tuple[float, frozenset[str]]]:
    """A factor and the names of the parameters of the chosen sites' branches, for each stream whose form asks for one."""
    for plan in module.origin.plans if isinstance(module, Rewritten) else ():
        factor = 1.0 if plan.warm_start else plan.form.learning_rate_factor(plan.stream)
        sites = [site for site in plan.stream.sites if plan.select is None or plan.select(site)]
        if factor != 1:
            yield factor, frozenset[str]().union(*(site.params for site in sites))
    attachment = attachment_of(module)
    for stream in attachment.streams if attachment is not None and attachment.model is module else ():
        if stream.rate != 1:
            yield stream.rate, frozenset[str]().union(*(stream.sites[index].params for index in stream.chosen))


def _branch_parameters(model: nn.Module, names: frozenset[str]) -> Iterator[nn.Parameter]:
    """The parameters of these names, and what has been put beside them since (an adapter)."""
    owners = tuple(f"{owner}." for name in names if (owner := name.rpartition(".")[0]))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names or name.startswith(owners):
            yield parameter
