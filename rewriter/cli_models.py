"""What MODEL says on the command line: where the model comes from.

package.module:callable     a function that returns a module, or (module, args) or (module, args, kwargs);
file.py:callable            or a module class without required arguments; or a module
torchvision:resnet18        any name of torchvision.models, random weights
timm:vit_tiny_patch16_224   any name of timm.list_models(), random weights
some/folder                 a transformers config.json; the weights beside it, random ones where there are none
program.pt2                 a saved torch.export program
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from resfx.cli_inputs import Args, Kwargs, UsageError

Loaded = tuple[nn.Module, tuple[Args, Kwargs] | None]

_SPECS = (
    "package.module:callable, file.py:callable, torchvision:NAME, timm:NAME, "
    "a folder with a transformers config.json, or a .pt2 file"
)


def load_model(spec: str) -> Loaded:
    """The module that `spec` names, in the mode its maker left it, and its example (args, kwargs) where it has some.

    Raises UsageError where there is no such model.
    """
    path = Path(spec)
    if path.suffix == ".pt2":
        return _from_program(path)
    if path.is_dir() or path.name == "config.json":
        return _from_config(path if path.is_dir() else path.parent)
    source, colon, name = spec.rpartition(":")
    if path.suffix == ".py":
        raise UsageError(_which_callable(_import_file(path), spec))
    if not colon or not source or not name:
        raise UsageError(f"There is no model {spec!r}: no such file or folder.\nMODEL is {_SPECS}.")
    if source == "torchvision":
        return _from_torchvision(name), None
    if source == "timm":
        return _from_timm(name), None
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    return _call(_attribute(module, source, name), spec)


def _from_program(path: Path) -> Loaded:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    if _is_aoti_package(path):
        raise UsageError(
            f"{path} is a package of AOTInductor, which holds no graph: resfx.export.load_aoti runs it. MODEL is {_SPECS}."
        )
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise UsageError(f"{path} is no program that torch.export.save wrote: {_short(error)}") from error
    module: Any = program.module(check_guards=False)
    # A fresh GraphModule: the program's own refuses train() and eval(), which are the same here.
    return GraphModule(module, module.graph), program.example_inputs


def _is_aoti_package(path: Path) -> bool:
    """Such packages and exported programs are archives of the same kind, and share the suffix."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/aotinductor/" in name for name in archive.namelist())


def _from_config(folder: Path) -> Loaded:
    if not (folder / "config.json").is_file():
        raise UsageError(f"The folder {folder} has no config.json.\nMODEL is {_SPECS}.")
    transformers = _library("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        factory = _architecture(transformers, config)
        weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
        model = factory.from_pretrained(folder, local_files_only=True) if weights else factory(config)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"transformers can't build the model of {folder}: {_short(error)}") from error
    return model.eval(), None


def _architecture(transformers: ModuleType, config: Any) -> Any:
    names = getattr(config, "architectures", None)
    if not names:
        return transformers.MODEL_MAPPING[type(config)]
    factory = getattr(transformers, names[0], None)
    if factory is None:
        raise UsageError(
            f"config.json asks for {names[0]}, which this transformers ({transformers.__version__}) lacks."
        )
    return factory


def _from_torchvision(name: str) -> nn.Module:
    models = _library("torchvision").models
    known = models.list_models()
    if name not in known:
        raise UsageError(f"torchvision has no model {name!r}.{_nearest(name, known)}")
    # Detection and segmentation builders download a backbone unless told not to.
    options = {"weights_backbone": None} if _takes(models.get_model_builder(name), "weights_backbone") else {}
    model: nn.Module = models.get_model(name, weights=None, **options)
    return model.eval()


def _from_timm(name: str) -> nn.Module:
    timm = _library("timm")
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise UsageError(f"timm has no model {name!r}.{_nearest(name, known)}")
    model: nn.Module = timm.create_model(name, pretrained=False)
    return model.eval()


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    name = f"resfx_user_{path.stem}"  # never the name of an installed module: a file may be called torch.py
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))  # what it imports from beside itself
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} can't be imported: {_short(error)}{_frame(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"There is no module {name!r} here or installed.\nMODEL is {_SPECS}.") from error
        raise UsageError(f"{name} can't be imported: {_short(error)}{_frame(error)}") from error
    except Exception as error:
        raise UsageError(f"{name} can't be imported: {_short(error)}{_frame(error)}") from error


def _attribute(module: ModuleType, source: str, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise UsageError(f"{source} has no {name!r}.{_nearest(part, [n for n in dir(value) if n[0] != '_'])}")
        value = getattr(value, part)
    return value


def _call(value: Any, spec: str) -> Loaded:
    if isinstance(value, nn.Module):
        return value, None
    if not callable(value):
        raise UsageError(f"{spec} is of type {type(value).__name__}: neither a module nor a function that returns one.")
    required = _required(value)
    if required:
        raise UsageError(
            f"{spec} needs arguments ({', '.join(required)}).\n"
            "Write a function without arguments that returns the module, and name that."
        )
    try:
        made = value()
    except Exception as error:
        raise UsageError(f"{spec} raised {_short(error)}{_frame(error)}") from error
    return _unpack(made, spec)


def _unpack(made: Any, spec: str) -> Loaded:
    if isinstance(made, nn.Module):
        return made, None
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        kind = type(made).__name__
        raise UsageError(f"{spec} returned {kind}; it must return a module, (module, args) or (module, args, kwargs).")
    args, kwargs = made[1], made[2] if len(made) == 3 else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise UsageError(f"{spec} returned (module, args, kwargs) where args is no tuple or kwargs no dict.")
    return made[0], (tuple(args), kwargs)


def _which_callable(module: ModuleType, source: str) -> str:
    """Of the file's own names, those that `_call` takes."""
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and _is_own(value, module)}
    names = [name for name, value in own.items() if isinstance(value, nn.Module) or not _required(value)]
    if not names:
        return f"{source} has no model: write a function without arguments that returns the module, and name it as {source}:NAME."
    return f"{source}: which of its names makes the model? Try: {', '.join(f'{source}:{name}' for name in names)}"


def _is_own(value: Any, module: ModuleType) -> bool:
    """Is it a module, or a function or module class that the file itself defines?"""
    if isinstance(value, nn.Module):
        return True
    makes = inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module))
    return makes and value.__module__ == module.__name__


def _required(function: Any) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"This model needs {name}: {error}.\nTry: pip install {name}") from error


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"\nNearest: {', '.join(close)}." if close else ""


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def _frame(error: BaseException) -> str:
    """Where the user's code raised: `(file:line)` of the innermost frame."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
