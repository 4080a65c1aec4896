"""rewrite on every model and form: names, types, numbers, gradients, training, copies, other sizes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models_steps import CACHE_FIELDS, FORMS, cases, distance, equal, loss_of, outputs, restored, run
from models_zoo import ZOO, Entry
from new_parameters import new_parameters, perturb
from torch import Tensor, nn

import resfx


@dataclass(frozen=True)
class Rewrite:
    """A model, its example call, and a rewrite of it."""

    entry: Entry
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: resfx.Form
    warm: bool
    result: resfx.Rewritten


@pytest.fixture(scope="module", params=list(cases()))
def case(request: pytest.FixtureRequest) -> Rewrite:
    name, form_name, start = request.param
    entry, form, warm = ZOO[name], FORMS[form_name](), start == "warm"
    model, args, kwargs = entry.build()
    result = resfx.rewrite(model, form, args, kwargs, warm_start=warm)
    return Rewrite(entry, model, args, kwargs, form, warm, result)


def test_every_stream_is_rewritten(case: Rewrite) -> None:
    found = case.result.residual_map
    assert tuple(len(stream.sites) for stream in found.streams) == case.entry.streams
    assert found.refused == {}
    assert found.forms == {stream.index: case.form.to_spec() for stream in found.streams}
    assert set(found.parameters) == set(new_parameters(case.result))


def test_state_dict_keeps_the_original_names(case: Rewrite) -> None:
    original, names = case.model.state_dict(), list(case.result.state_dict())
    assert {name for name in names if not name.startswith("residual.")} == set(original)
    other = {name: value + 1 if value.is_floating_point() else value for name, value in original.items()}
    with restored(case.result) as model:
        missing, unexpected = model.load_state_dict(other, strict=False)
        assert not unexpected
        assert set(missing) == set(new_parameters(model))
        assert all(torch.equal(model.state_dict()[name], value) for name, value in other.items())
    # Tied weights stay tied: as many distinct parameters as before.
    assert len(list(case.result.parameters())) == len(list(case.model.parameters())) + len(new_parameters(case.result))


def called_modules(model: nn.Module, names: set[str], args: Any, kwargs: Any) -> set[str]:
    called: set[str] = set()
    hooks = [model.get_submodule(n).register_forward_hook(lambda *_, n=n: called.add(n)) for n in names]
    outputs(model, args, kwargs)
    for hook in hooks:
        hook.remove()
    return called


def test_the_leaves_are_the_users_own(case: Rewrite) -> None:
    """Same classes under the same names, called where the model calls them: an adapter finds its nn.Linear."""
    for name, module in case.model.named_modules():
        if name:
            assert type(case.result.get_submodule(name)) is type(module), name
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.Embedding)
    names = {name for name, module in case.model.named_modules() if isinstance(module, kinds)}
    expected = called_modules(case.model, names, case.args, case.kwargs)
    assert expected
    assert called_modules(case.result, names, case.args, case.kwargs) == expected


def test_output_keeps_its_type(case: Rewrite) -> None:
    plain = case.model(*case.args, **case.kwargs)
    got = case.result(*case.args, **case.kwargs)
    assert type(got) is type(plain)
    if isinstance(plain, dict):  # the output classes of transformers
        assert {key for key, value in got.items() if value is not None} == set(plain) - CACHE_FIELDS
    if isinstance(plain, tuple):
        assert [type(value) for value in got] == [type(value) for value in plain]


def test_start(case: Rewrite) -> None:
    """Started warm it is the model; a form that says it starts as another function does."""
    gap = distance(outputs(case.result, case.args, case.kwargs), outputs(case.model, case.args, case.kwargs))
    if case.warm:
        assert gap < 1e-5
    elif case.form.at_init == "different":
        assert gap > 1e-3


def reference(case: Rewrite, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """What the result must give: what the model gives; not started warm, what its rows give in two parts."""
    if case.warm:
        return outputs(case.model, args, kwargs)

    def rows(part: slice) -> dict[str, Tensor]:
        return outputs(case.result, tuple(a[part] for a in args), {name: a[part] for name, a in kwargs.items()})

    first, others = rows(slice(0, 2)), rows(slice(2, None))
    return {path: torch.cat([first[path], others[path]]) for path in first}


@pytest.mark.parametrize("batch", [3, 7])
def test_other_batch_sizes(case: Rewrite, batch: int) -> None:
    args, kwargs = case.entry.inputs(batch)
    assert distance(outputs(case.result, args, kwargs), reference(case, args, kwargs)) < 1e-5


def test_other_lengths(case: Rewrite) -> None:
    if case.entry.longer is None:
        return
    args, kwargs = case.entry.longer(3)
    assert distance(outputs(case.result, args, kwargs), reference(case, args, kwargs)) < 1e-5


def test_sizes_that_are_fixed_are_refused(case: Rewrite) -> None:
    """Never silently wrong numbers."""
    if case.entry.refused is None:
        return
    args, kwargs = case.entry.refused(2)
    with pytest.raises(resfx.GuardError, match=next(iter(kwargs))):
        outputs(case.result, args, kwargs)


def test_every_new_parameter_counts(case: Rewrite) -> None:
    with restored(case.result) as model:
        perturb(model)
        before = outputs(model, case.args, case.kwargs)
        silent = []
        for name, parameter in new_parameters(model).items():
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
            if not distance(outputs(model, case.args, case.kwargs), before) > 1e-5:
                silent.append(name)
            with torch.no_grad():
                parameter.copy_(kept)
        assert silent == []


def test_gradients_and_a_train_step(case: Rewrite) -> None:
    expected = trained_by(case)
    with restored(case.result) as model:
        perturb(model)
        model.train()
        assert all(module.training for module in model.modules())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(0)
        loss_of(run(model, case.args, case.kwargs)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        new = new_parameters(model)
        assert gradients.keys() == expected | new.keys()
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
        assert [name for name in new if not gradients[name].abs().max() > 0] == []
        # BatchNorm is alive.
        assert all(int(value) == 1 for name, value in model.named_buffers() if name.endswith("num_batches_tracked"))
        before = {name: p.detach().clone() for name, p in new.items()}
        optimizer.step()
        assert [name for name, p in new.items() if torch.equal(p, before[name])] == []
        assert all(torch.isfinite(value).all() for value in outputs(model.eval(), case.args, case.kwargs).values())


def trained_by(case: Rewrite) -> set[str]:
    """The parameters of the plain model that get a gradient in train mode."""
    model = copy.deepcopy(case.model).train()
    torch.manual_seed(0)
    loss_of(run(model, case.args, case.kwargs)).backward()
    return {name for name, p in model.named_parameters() if p.grad is not None}


def test_deepcopy(case: Rewrite) -> None:
    before = outputs(case.result, case.args, case.kwargs)
    copied = copy.deepcopy(case.result)
    assert isinstance(copied, resfx.Rewritten)
    assert copied.residual_map.parameters == case.result.residual_map.parameters
    assert equal(outputs(copied, case.args, case.kwargs), before)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert equal(outputs(case.result, case.args, case.kwargs), before), "the copy shares parameters"
