"""Load a reward function by its name. This imports the user's code, so it runs only in a process that scores."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.host.installation import install_command
from hpc_rl.rewards import signature
from hpc_rl.rewards.check import FunctionLocation, check_function, locate

_files: list[Path] = []
"""The files that this process has loaded functions from. Their folders are where `import` finds other modules."""


def load_function(spec: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Load the function that reward.function names, with reward.kwargs bound.

    Raises:
        UserError: the function is missing, cannot be imported, is not a function, or has unsuitable parameters.
    """
    check_function(spec, kwargs, same_python=False)
    location = locate(spec)
    module = _imported(spec, location)
    function = vars(module).get(location.function)
    if function is None:
        raise UserError(f"reward.function {spec}: no {location.function!r} in {module.__name__}")
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else type(function).__name__
        raise UserError(f"reward.function {spec} is {kind}, but a function is needed: {signature.EXPECTED}")
    signature.check(spec, inspect.signature(function), kwargs)
    return partial(function, **kwargs)


def _imported(spec: str, location: FunctionLocation) -> ModuleType:
    try:
        return importlib.import_module(location.module) if location.file is None else _from_file(location.file)
    except ModuleNotFoundError as error:
        hint = f": {install_command('rl')}" if location.module.startswith("hpc_rl.") else ""
        raise UserError(f"reward.function {spec} needs {error.name}, which is not installed{hint}") from error
    except UserError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"reward.function {spec}: importing it raised {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    # The prefix keeps a file called math.py from replacing Python's module.
    name = f"_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    if path.resolve() not in _files:
        _refuse_ambiguous(path.resolve())
        _files.append(path.resolve())
        sys.path.append(str(path.resolve().parent))
    found.loader.exec_module(module)
    return module


def _refuse_ambiguous(path: Path) -> None:
    """Refuse a file beside which there is a module of the same name as beside another function's file: all functions
    would import one of them."""
    for other in _files:
        both = {file.name for file in path.parent.glob("*.py")} & {file.name for file in other.parent.glob("*.py")}
        names = sorted(both - {"__init__.py"} - ({path.name} & {other.name}))  # functions are loaded by their paths
        if names and path.parent != other.parent:
            raise UserError(
                f"{path.with_name(names[0])} has the name of {other.with_name(names[0])}, which another of "
                "reward.functions may import in the same process: rename one of them, or put both functions into one "
                "folder"
            )
