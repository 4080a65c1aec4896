"""What each model of the zoo is taken through: find, a rewrite to two forms, ONNX. A step's result is a small dict.

status: "pass"; "refuse" (a ResfxError, with its text as reason); "fail" (wrong, or any other exception); "skip" (there is
nothing to do, or the plain model can't do it either, with the reason).
"""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parent.parent))  # the sweep runs as a script too

import torch
from new_parameters import new_parameters, perturb
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_builders import ZOO, build

import resfx

Result: TypeAlias = dict[str, Any]
Report: TypeAlias = Callable[[str, Result], None]

FORMS: dict[str, Callable[[], resfx.Form]] = {"delta": resfx.DeltaAttention, "multigate": resfx.MultiGate}
TOLERANCE = 1e-5
VISIBLE = 1e-6  # relative: well above what float32 rounds away
VISIBLE_IN_DOUBLE = 1e-13
# Where transformers returns a key/value cache or a state, which a rewritten model does not keep.
CACHE_FIELDS = ("past_key_values", "cache", "cache_params")


def passed(good: bool, reason: str, **more: Any) -> Result:
    return {"status": "pass", **more} if good else {"status": "fail", "reason": reason, **more}


def attempt(work: Callable[[], Result]) -> Result:
    """A refusal of ours is a "refuse"; every other exception is a failure of ours."""
    try:
        return work()
    except resfx.ResfxError as error:
        return {"status": "refuse", "class": type(error).__name__, "reason": str(error)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return {"status": "fail", "class": type(error).__name__, "reason": f"{type(error).__name__}: {error} ({where})"}


class Subject:
    """One model of the zoo; what several steps need is made once."""

    def __init__(self, name: str) -> None:
        self.name, self.row = name, ZOO[name]
        self.model, self.args, self.kwargs = build(name)
        self._rewritten: dict[str, resfx.Rewritten] = {}

    @property
    def sites(self) -> int:
        return int(self.row["sites"] + self.row["scaled_sites"])

    @functools.cached_property
    def plain_onnx(self) -> Result:
        return attempt(lambda: export(self, self.model))

    def rewritten(self, form: str) -> resfx.Rewritten:
        if form not in self._rewritten:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._rewritten[form] = resfx.rewrite(
                    self.model, FORMS[form](), self.args, self.kwargs, warm_start=True
                )
        return self._rewritten[form]


def find_steps(subject: Subject, report: Report) -> None:
    """capture, then sites, branches, streams and source lines against the table."""
    found: list[resfx.ResidualMap] = []

    def capture() -> Result:
        found.append(resfx.find(subject.model, subject.args, subject.kwargs))
        return {"status": "pass"}

    report("capture", attempt(capture))
    if found:
        for step, result in compare_map(subject, found[0]).items():
            report(step, result)


def compare_map(subject: Subject, found: resfx.ResidualMap) -> dict[str, Result]:
    row, sites = subject.row, found.sites
    lines = Counter(site.source.rsplit("/", 1)[-1] for site in sites)
    expected = Counter({line: count for line, count in row["lines"].items() if count})
    more, fewer = dict(lines - expected), dict(expected - lines)
    counts = {
        "sites": (len(sites), subject.sites),
        "branches": (sum(len(site.branches) for site in sites), row["branches"] + row["scaled_sites"]),
        "streams": (len(found.streams), row["streams"]),
    }
    if row["scaled_sites"]:
        del counts["streams"]  # the table's streams are chains of unscaled sites
    results = {
        step: passed(got == want, f"{got} for {want}", got=got, want=want) for step, (got, want) in counts.items()
    }
    # The table has lines for unscaled sites only in a few rows: then the sum does not tell.
    if sum(expected.values()) == subject.sites:
        results["lines"] = passed(not more and not fewer, f"more {more}, fewer {fewer}")
    refused = Counter(site.refused for site in sites if site.refused) + Counter(
        stream.refused for stream in found.streams if stream.refused
    )
    unknown = sum(stream.axis is None for stream in found.streams)
    results["sites"] |= {"refused": dict(refused), "unknown_axes": unknown, "confidence": row["confidence"]}
    return results


def warm_start_steps(subject: Subject, report: Report, form: str) -> resfx.Rewritten | None:
    """The rewrite, and that it starts as the model it was made of."""
    results: list[resfx.Rewritten] = []

    def rewrite() -> Result:
        try:
            results.append(subject.rewritten(form))
        except resfx.NoResidualFound:
            if subject.sites == 0:
                return {"status": "skip", "reason": "the model has no residual connection"}
            raise
        refused = results[0].residual_map.refused
        if refused:
            return {"status": "refuse", "class": "stream", "reason": "; ".join(sorted(set(refused.values())))}
        return {"status": "pass"}

    report(f"{form}.rewrite", attempt(rewrite))
    if not results:
        return None
    result = results[0]
    report(f"{form}.names", attempt(lambda: names_step(subject, result)))
    report(f"{form}.eval", attempt(lambda: equal_step(subject, result)))
    report(f"{form}.train", attempt(lambda: train_step(subject, result)))
    return result


def rewrite_steps(subject: Subject, report: Report, form: str) -> None:
    """The rewrite with a warm start, and what must hold of it once its parameters move."""
    result = warm_start_steps(subject, report, form)
    if result is None:
        return
    for step, outcome in perturbed_steps(subject, result, form).items():
        report(f"{form}.{step}", outcome)


def quick_steps(subject: Subject, report: Report) -> None:
    """find and a warm start with two captures in place of five: the map that the rewrite went by is compared with the table."""
    result = warm_start_steps(subject, report, "delta")
    if result is None:
        find_steps(subject, report)
        return
    for step, outcome in compare_map(subject, result.residual_map).items():
        report(step, outcome)


def names_step(subject: Subject, result: nn.Module) -> Result:
    kept = {name for name in result.state_dict() if not name.startswith("residual.")}
    changed = sorted(kept ^ set(subject.model.state_dict()))
    return passed(not changed, f"differ: {changed[:5]}")


def equal_step(subject: Subject, result: nn.Module) -> Result:
    return compared(subject.model.eval(), result.eval(), subject.args, subject.kwargs)


def train_step(subject: Subject, result: nn.Module) -> Result:
    """Equal with the same random numbers, on copies: BatchNorm learns. One row is two where a norm needs two."""
    try:
        plain = copy.deepcopy(subject.model).train()
        result = copy.deepcopy(result).train()
        calls = [(subject.args, subject.kwargs), twice((subject.args, subject.kwargs))]
        args, kwargs = next(call for call in calls if runs(plain, *call))
    except StopIteration:
        return {"status": "skip", "reason": "the plain model does not run in train mode"}
    plain = copy.deepcopy(subject.model).train()
    return compared(plain, result, args, kwargs)


def twice(call: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda value: torch.cat([value, value.flip(-1)]), call)


def runs(model: nn.Module, args: Any, kwargs: Any) -> bool:
    try:
        outputs(model, args, kwargs)
    except Exception:
        return False
    return True


def compared(plain: nn.Module, result: nn.Module, args: Any, kwargs: Any) -> Result:
    gap = distance(outputs(result, args, kwargs), outputs(plain, args, kwargs))
    return passed(gap <= TOLERANCE, f"differs by {gap:.1e}", gap=gap)


def perturbed_steps(subject: Subject, result: nn.Module, form: str) -> dict[str, Result]:
    """gradients: finite everywhere. parameters: each new one changes the output.

    A gradient well above the noise at the perturbed point says so; the others are changed one by one, and by much: branches that
    a model starts with small weights say little. What a norm after the sum all but takes back shows in float64.
    """
    model = copy.deepcopy(result).eval()
    wake(model)
    perturb(model)
    args, kwargs = subject.args, subject.kwargs
    silent: list[str] = []

    def gradients() -> Result:
        torch.manual_seed(0)
        trained = copy.deepcopy(model)  # what a model keeps of a run with gradients can't be copied
        loss_of(run(trained, args, kwargs)).backward()
        graded = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
        silent.extend(n for n in new_parameters(model) if n not in graded or not graded[n].abs().max() > VISIBLE)
        wrong = [name for name, gradient in graded.items() if not torch.isfinite(gradient).all()]
        return passed(not wrong, f"not finite: {wrong[:5]}")

    def parameters() -> Result:
        before = outputs(model, args, kwargs)
        dead = [name for name in silent if not distance(outputs(changed(model, name), args, kwargs), before) > VISIBLE]
        if dead:
            dead = dead_in_double(subject, form, model, dead)
        count = len(new_parameters(model))
        return passed(not dead, f"{len(dead)} of {count} change nothing: {dead[:5]}")

    return {"gradients": attempt(gradients), "parameters": attempt(parameters)}


def dead_in_double(subject: Subject, form: str, model: nn.Module, names: list[str]) -> list[str]:
    """Those of `names` whose change can't be seen in float64 either, nor with the model's own parameters as they were.

    All of them where the plain model does not run in float64.
    """
    plain = copy.deepcopy(subject.model).double()
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda value: value.double() if value.is_floating_point() else value, (subject.args, subject.kwargs)
    )
    if not runs(plain.eval(), args, kwargs):
        return names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        double = resfx.rewrite(plain, FORMS[form](), args, kwargs, warm_start=True).eval()
    woken = copy.deepcopy(double)
    woken.load_state_dict(model.state_dict())
    perturb(double)
    for point in (woken, double):
        before = outputs(point, args, kwargs)
        gaps = {name: distance(outputs(changed(point, name), args, kwargs), before) for name in names}
        names = [name for name, gap in gaps.items() if not gap > VISIBLE_IN_DOUBLE]
    return names


def changed(model: nn.Module, name: str) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameter = other.get_parameter(name)
        parameter += 100 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).to(parameter)
    return other


def onnx_steps(subject: Subject, report: Report, form: str) -> None:
    """ONNX of the plain model, then of the rewritten one, perturbed: to_onnx runs them in ONNX Runtime."""
    report("onnx", subject.plain_onnx)
    if subject.plain_onnx["status"] == "pass":
        report(f"{form}.onnx", attempt(lambda: export_rewritten(subject, form)))


def export_rewritten(subject: Subject, form: str) -> Result:
    if subject.sites == 0:
        return {"status": "skip", "reason": "the model has no residual connection"}
    model = copy.deepcopy(subject.rewritten(form)).eval()
    perturb(model)
    return export(subject, model)


def export(subject: Subject, model: nn.Module) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        resfx.export.to_onnx(model, Path(folder) / "model.onnx", subject.args, subject.kwargs)
    return {"status": "pass"}


def run(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The output's floating tensors by their place in it, without a key/value cache."""
    leaves = pytree.tree_flatten_with_path(model(*args, **kwargs))[0]
    named = {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    kept = {path: leaf for path, leaf in named.items() if leaf.is_floating_point()}
    return {path: value for path, value in kept.items() if not any(field in path for field in CACHE_FIELDS)}


@torch.no_grad()
def outputs(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return run(model, args, kwargs)


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest relative norm over the outputs. Infinite where names, shapes or the places of non-finite numbers differ."""
    if not want or {path: (v.shape, v.dtype) for path, v in got.items()} != {
        path: (v.shape, v.dtype) for path, v in want.items()
    }:
        return float("inf")
    return max(relative(got[path].double(), want[path].double()) for path in want)


def relative(got: Tensor, want: Tensor) -> float:
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    got, want = got[finite], want[finite]
    difference = float((got - want).norm())
    return difference / float(want.norm()) if difference else 0.0


@torch.no_grad()
def wake(model: nn.Module) -> None:
    """What would hide every change grows: layer scales of 1e-5, faint norms and zero gates to 0.2 to 0.5, small matrices to the usual.

    One that is the same number everywhere, such as a gain per channel, is no matrix.
    """
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if not (parameter.numel() and parameter.is_floating_point()) or name.startswith("residual."):
            continue
        faint = parameter.dim() < 2 and not name.endswith("bias") and parameter.square().mean() < 0.01
        if faint or not parameter.abs().max() > 1e-2:
            parameter.copy_(0.2 + 0.3 * torch.rand(parameter.shape, generator=generator))
        elif parameter.dim() > 1 and 0 < parameter.std() < 0.5 * (usual := parameter[0].numel() ** -0.5):
            parameter *= usual / parameter.std()


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """A scalar that depends on every element with a weight of its own, relative to the size of its output."""
    parts = [value.nan_to_num(0.0, 0.0, 0.0).double().flatten() for value in found.values()]
    parts = [part / part.detach().norm().clamp_min(1e-12) for part in parts]
    return torch.stack([(part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype)).sum() for part in parts]).sum()


GROUPS: dict[str, Callable[[Subject, Report], None]] = {
    "find": find_steps,
    "delta": lambda subject, report: rewrite_steps(subject, report, "delta"),
    "multigate": lambda subject, report: rewrite_steps(subject, report, "multigate"),
    "onnx": lambda subject, report: onnx_steps(subject, report, "delta"),
    "multigate_onnx": lambda subject, report: onnx_steps(subject, report, "multigate"),
    "quick": quick_steps,
}
COVERAGE = ("find", "delta", "multigate", "onnx", "multigate_onnx")  # what docs/coverage.md has a table of
