"""`to_onnx`: a model as an ONNX file that was run and compared before it is put in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from resfx.export.call import Call, make_call, unique_names
from resfx.export.capture import capture
from resfx.export.compare import tolerance_for
from resfx.export.errors import InputError, UnsupportedDtypeError
from resfx.export.feeds import feeds_for
from resfx.export.onnx_calls import calls_kept
from resfx.export.onnx_check import UNSUPPORTED, check_runs
from resfx.export.onnx_functions import functions_for
from resfx.export.onnx_graph import check_file, first_of_dtypes, opset_of, rename, save, translate
from resfx.export.onnx_report import OnnxReport, describe
from resfx.export.paths import checked_path, staged
from resfx.export.run import check_module, evaluating, run_example
from resfx.export.sizes import symbols_named


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset: int | None = None,
    dynamic_shapes: Any = None,
    check: bool = True,
    functions: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    inline: bool = False,
    tolerance: float | None = None,
) -> OnnxReport:
    """Export `model`, called as `model(*args, **kwargs)` in eval mode, to the file `path`.

    Inputs: the tensors in args and kwargs, nested or not; numbers, strings and None are constants. Outputs: the tensors
    in the return value, flattened; None is left out. The names follow the arguments and the fields of the result.
    `dynamic_shapes`: as for torch.export.export; by default every size stays open that the model leaves open.
    `opset`: default operator set; by default the exporter's own. `functions`: torch op -> onnxscript function.
    `inline`: calls of named functions (see `register_calls`) become plain nodes; else they are functions in the file.

    `check`: run onnx.checker, then ONNX Runtime on the CPU with its graph optimisations off and on, on the example and
    on another batch size (the example's rows repeated or cut along each dim that the export left to the batch), and
    compare with the model: relative norm of at most `tolerance` (default by dtype, 2e-5 for float32), see `compare`.

    The file appears only if all of that passed. Past 2 GB the weights stand beside it in `<file name>.data`. The model,
    its train/eval flags and its buffers are left as they were.

    Raises NotAModuleError, InputError, OutputError, OutputPathError, UnsupportedDtypeError, TraceError,
    DynamicDimError, OnnxExportError, OnnxRunError, OutputMismatchError: all subclasses of ResfxError.
    """
    from resfx.export.onnx_local import LocalFunctions  # which imports onnx

    target = checked_path(path)
    _check_options(opset, dynamic_shapes, functions, tolerance)
    model = check_module(model)
    call = make_call(model, args, kwargs)
    if check:
        _refuse_dtypes(model, call)
    with evaluating(model), staged(target) as file:
        want = run_example(model, call)
        with calls_kept(model) as operators:
            found = capture(model, call, dynamic_shapes, flat=True)
        taken = (*call.names, *model.state_dict(keep_vars=True))
        outputs = unique_names(want.names, taken, suffix="_out")
        local = LocalFunctions(operators)
        table = functions_for(found.program, local.translations | dict(functions or {}))
        program = translate(found.program, call.names, outputs, opset, table)
        local.add_to(program, inline=inline)
        rename(program, symbols_named(found.sizes, call.names, found.spec))
        save(program, file)
        notes = [*found.notes, *(f"output {name} is no tensor and is left out" for name in want.dropped)]
        differences = {}
        if check:
            check_file(file)
            feeds, fixed = feeds_for(model, call, found.sizes, want.tensors)
            notes.extend(fixed)
            allowed = tolerance_for([*want.tensors, *model.parameters()], tolerance)
            differences = check_runs(file, call.names, outputs, feeds, allowed)
        return describe(program, target, file, opset_of(program), differences, notes)


def _refuse_dtypes(model: nn.Module, call: Call) -> None:
    tensors = dict(zip(call.names, call.tensors, strict=True))
    culprit = first_of_dtypes(model, tensors, UNSUPPORTED)
    if culprit is None:
        return
    raise UnsupportedDtypeError(
        f"{culprit}, and ONNX Runtime's CPU provider has no matrix product for it: export model.float() with float32 "
        "inputs, or pass check=False to write the file without running it"
    )


def _check_options(opset: Any, dynamic_shapes: Any, functions: Any, tolerance: Any) -> None:
    """Raises InputError for an option of another kind, before anything runs."""
    if opset is not None and (type(opset) is not int or opset < 1):
        raise InputError(f"opset={opset!r} is no number of an operator set: write opset=18, or leave it out")
    if dynamic_shapes is not None and not isinstance(dynamic_shapes, (Mapping, Sequence)):
        raise InputError(
            f"dynamic_shapes={dynamic_shapes!r}: write a dict by argument name, as for torch.export.export"
        )
    if functions is not None and not isinstance(functions, Mapping):
        raise InputError(f"functions={functions!r}: write a dict of torch op -> onnxscript function")
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, (int, float))):
        raise InputError(f"tolerance={tolerance!r} is no number: write for example tolerance=1e-4")
