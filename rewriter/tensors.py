"""The tensors of a module by name: all names of a shared one, and how to put others in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """A parameter's or buffer's place: module and name in it."""

    owner: nn.Module
    leaf: str
    persistent: bool

    @property
    def tensor(self) -> Tensor:
        value = self._store()[self.leaf]
        assert value is not None
        return value

    def put(self, value: Tensor) -> None:
        """Replace the tensor object."""
        self._store()[self.leaf] = value

    @property
    def is_parameter(self) -> bool:
        return self.leaf in self.owner._parameters

    def _store(self) -> dict[str, Tensor | None]:
        return self.owner._parameters if self.is_parameter else self.owner._buffers  # type: ignore[return-value]


def slots(module: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer, under each of its names."""
    return {f"{path}.{slot.leaf}" if path else slot.leaf: slot for path, slot in _slots(module)}


def _slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, value in owner._parameters.items():
            if value is not None:
                yield path, Slot(owner, leaf, True)
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                # The one place that says which buffers belong to a state_dict; torch has no public one.
                yield path, Slot(owner, leaf, leaf not in owner._non_persistent_buffers_set)


def persistent(module: nn.Module) -> dict[str, Slot]:
    """What a state_dict holds."""
    return {name: slot for name, slot in slots(module).items() if slot.persistent}


def shared_names(found: Mapping[str, Slot]) -> dict[str, str]:
    """Second name -> first name, for names of one tensor: the same object, or the same numbers in memory."""
    first: dict[object, str] = {}
    second: dict[str, str] = {}
    for name, slot in found.items():
        known = next((first[key] for key in _keys(slot.tensor) if key in first), None)
        if known is not None:
            second[name] = known
        for key in _keys(slot.tensor):
            first.setdefault(key, known or name)
    return second


def _keys(tensor: Tensor) -> Iterator[object]:
    yield id(tensor)
    if not tensor.is_meta and tensor.numel():
        yield tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def replace_object(found: Mapping[str, Slot], old: Tensor, new: Tensor, undo: ExitStack) -> None:
    """Put `new` wherever `old` is."""
    for slot in [slot for slot in found.values() if slot.tensor is old]:
        slot.put(new)
        undo.callback(slot.put, old)


def recast(tensor: Tensor, data: Tensor, undo: ExitStack) -> None:
    """Other memory, such as that of another dtype, for the same tensor object."""
    undo.callback(setattr, tensor, "data", tensor.data)
    tensor.data = data


def materialised(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A real tensor of zeros of the kind of `tensor`, which is on the meta device."""
    zeros = torch.zeros(tensor.shape, dtype=dtype, device=device)
    return nn.Parameter(zeros, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else zeros


def device_of(values: Iterable[object]) -> torch.device:
    """The device of the first tensor that has one to compute on, else the CPU."""
    real = (v.device for v in values if isinstance(v, Tensor) and not v.is_meta)
    return next(real, torch.device("cpu"))
