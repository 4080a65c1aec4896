"""`save` and `load`: a rewritten model as a folder of safetensors and one JSON file.

The folder holds `model.safetensors` (or shards and an index, as the Hugging Face Hub has them): every parameter and
persistent buffer, a shared one once; `resfx.json`: the forms, the sites, the architecture's fingerprint; and
`constants.safetensors`, where the model has non-persistent buffers: their dtype counts, their numbers only for models on
the meta device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from resfx.capture import check_module, example_call
from resfx.checkpoint_files import CheckpointError, TensorFiles, new_folder, write_tensors
from resfx.checkpoint_record import Record, RecordedPlan, fingerprints, versions
from resfx.passes import Plan
from resfx.patterns import ResfxError, Stream
from resfx.revert import require_rewritten
from resfx.rewrite import Call, copied, rewrite_by
from resfx.rewritten import Rewritten, is_attached
from resfx.tensors import Slot, device_of, materialised, persistent, recast, replace_object, shared_names, slots

_NEW = "residual."


def save(model: nn.Module, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write the rewritten `model` to `folder`: safetensors and JSON, never a pickle.

    Files grow to `max_shard_bytes`, then there are several. The folder appears whole or not at all; an earlier checkpoint
    in it is replaced, a folder with other files is refused. Its parent must exist.
    Errors: NotRewritten, CheckpointPathError, CheckpointError (a tensor that can't be stored).
    """
    own = require_rewritten(model, "saved")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} must be at least 1; the default is 5 GB")
    _refuse_extra_state(own)
    origin = own.origin
    held = persistent(own)
    _refuse_meta(held)
    shared = shared_names(held)
    tensors = {name: slot.tensor for name, slot in held.items() if name not in shared}
    constants = {name: slot.tensor for name, slot in slots(origin.model).items() if not slot.persistent}
    plans = tuple(RecordedPlan.of(plan) for plan in origin.plans)
    record = Record(plans, fingerprints(own.residual_map.streams), shared, versions())
    with new_folder(folder) as fresh:
        write_tensors(fresh, "model", tensors, max_shard_bytes)
        if constants:
            write_tensors(fresh, "constants", constants, max_shard_bytes)
        record.write(fresh)


def load(
    original_model: nn.Module,
    folder: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    frontend: str = "export",
    copy: bool = True,
) -> Rewritten:
    """Rewrite `original_model` as it was when `folder` was saved, with the saved numbers.

    The arguments are those of `rewrite`; the forms and sites come from the checkpoint. dtypes are those of the checkpoint,
    devices those of `original_model`; what is on the meta device comes to the device of the example arguments.
    Tensors that were one when saved are one in the result.
    With `copy=False` a refused checkpoint leaves `original_model` as it was.
    Errors: CheckpointError where the architecture is another one (it names the first site that differs), or a tensor is
    missing, unexpected or of another shape (it names them), or files are damaged; CheckpointPathError; as `rewrite`.
    """
    check_module(original_model)
    if isinstance(original_model, Rewritten):
        raise CheckpointError("load takes the original model and rewrites it; pass resfx.revert(model)")
    if is_attached(original_model):
        raise CheckpointError(
            f"this {type(original_model).__name__} is attached (resfx.attach): resfx.load a plain one, and give its state_dict() to"
            " this one's load_state_dict"
        )
    where = Path(os.path.abspath(os.path.expanduser(folder)))
    record, saved = Record.read(where), TensorFiles.of(where, "model")
    call = Call(*example_call(args, kwargs), dynamic_shapes, frontend)
    plain = copied(original_model) if copy else original_model
    with ExitStack() as undo:
        result = _rewritten(plain, call, record, saved, _constants(where), undo)
        undo.pop_all()
    new = {name: slot for name, slot in persistent(result).items() if name.startswith(_NEW)}
    stored = {name: name for name in saved if name.startswith(_NEW)}
    problem = _mismatch(new, stored, saved)
    if problem is not None:
        raise CheckpointError(problem)
    for name, slot in new.items():
        if slot.tensor.dtype != saved.dtype(name):
            recast(slot.tensor, slot.tensor.data.to(saved.dtype(name)), ExitStack())
    _fill(new, stored, saved)
    return result


def _rewritten(
    plain: nn.Module, call: Call, record: Record, saved: TensorFiles, constants: TensorFiles, undo: ExitStack
) -> Rewritten:
    """`plain` rewritten by the record, its own tensors loaded once the architecture is known to be the saved one."""
    own = persistent(plain)
    stored = {name: name for name in saved if not name.startswith(_NEW)}
    stored |= {second: first for second, first in record.shared.items() if not second.startswith(_NEW)}
    problem = _mismatch(own, stored, saved)
    device = device_of(pytree.tree_leaves((call.args, call.kwargs)))
    _prepare(plain, {} if problem else stored, saved, constants, device, undo)

    def plans_for(streams: Sequence[Stream]) -> list[Plan]:
        record.check(streams)
        if problem is not None:
            raise CheckpointError(problem)
        _fill(own, stored, saved)
        return [recorded.plan(streams) for recorded in record.plans]

    try:
        return rewrite_by(plain, call, plans_for, insist=True)
    except ResfxError as error:
        if problem is None or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(problem) from error


def _prepare(
    plain: nn.Module,
    stored: Mapping[str, str],
    saved: TensorFiles,
    constants: TensorFiles,
    device: torch.device,
    undo: ExitStack,
) -> None:
    """Give every tensor of `plain` memory and its saved dtype, and tie what was saved as one."""
    everything = slots(plain)
    dtypes = {name: saved.dtype(source) for name, source in stored.items()}
    dtypes |= {name: constants.dtype(name) for name in constants if stored}
    one = shared_names(everything)
    for name, slot in everything.items():
        tensor = slot.tensor
        dtype = dtypes.get(name, tensor.dtype)
        if not slot.persistent and tensor.is_meta:
            _restore_constant(name, everything, constants, device, undo)
        elif tensor.is_meta:
            replace_object(everything, tensor, materialised(tensor, dtype, device), undo)
        elif tensor.dtype != dtype:
            recast(tensor, everything[one[name]].tensor.data if name in one else tensor.data.to(dtype), undo)
    one = shared_names(everything)
    for name, source in stored.items():
        if name != source and one.get(name, name) != one.get(source, source):
            _tie(everything[name], everything[source], undo)


def _tie(second: Slot, first: Slot, undo: ExitStack) -> None:
    if second.is_parameter != first.is_parameter:
        return
    undo.callback(second.put, second.tensor)
    second.put(first.tensor)


def _restore_constant(
    name: str, everything: Mapping[str, Slot], constants: TensorFiles, device: torch.device, undo: ExitStack
) -> None:
    tensor = everything[name].tensor
    if name not in constants or constants.shape(name) != tuple(tensor.shape):
        raise CheckpointError(
            f"buffer {name} is on the meta device and not in the checkpoint: give it its values before load"
        )
    replace_object(everything, tensor, constants.get(name).to(device), undo)


def _fill(own: Mapping[str, Slot], stored: Mapping[str, str], saved: TensorFiles) -> None:
    done: set[int] = set()
    with torch.no_grad():
        for name, slot in own.items():
            if id(slot.tensor) not in done:
                done.add(id(slot.tensor))
                slot.tensor.copy_(saved.get(stored[name]))


def _mismatch(own: Mapping[str, Slot], stored: Mapping[str, str], saved: TensorFiles) -> str | None:
    """How the names and shapes of a model's tensors differ from the stored ones. `stored`: name -> name in the files."""
    missing = [name for name in own if name not in stored or stored[name] not in saved]
    unexpected = [name for name in stored if name not in own]
    shapes = [
        f"{name} (saved {saved.shape(stored[name])}, the model has {tuple(own[name].tensor.shape)})"
        for name in own
        if name not in missing and saved.shape(stored[name]) != tuple(own[name].tensor.shape)
    ]
    apart = [
        f"{second} and {first}"
        for second, first in shared_names(own).items()
        if second in stored and first in stored and stored[second] != stored[first]
    ]
    parts = [
        f"{what}: {', '.join(names[:10])}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        for what, names in (
            ("not in the checkpoint", missing),
            ("not in the model", unexpected),
            ("of another shape", shapes),
            ("one tensor in the model, two in the checkpoint", apart),
        )
        if names
    ]
    if not parts:
        return None
    return f"the checkpoint's tensors are not the model's; {'; '.join(parts)}. Pass the model it was saved from"


def _constants(folder: Path) -> TensorFiles:
    written = any(folder.glob("constants*.safetensors"))
    return TensorFiles.of(folder, "constants") if written else TensorFiles()


def _refuse_extra_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module `{path}` ({type(module).__name__}) has extra state, which takes a pickle: "
                "keep it in buffers, or save its state apart and remove get_extra_state"
            )


def _refuse_meta(held: Mapping[str, Slot]) -> None:
    empty = [name for name, slot in held.items() if slot.tensor.is_meta]
    if empty:
        raise CheckpointError(f"{', '.join(empty[:5])}: on the meta device, without numbers to save; load them first")
