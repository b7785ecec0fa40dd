"""Load a reward function by its name. This imports the user's code, so it runs only in a process that scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.rewards import signature
from hpc_rl.rewards.check import check_function, locate
from hpc_rl.software.user_code import import_module


def load_function(spec: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Load the function that reward.function names, with reward.kwargs bound.

    Raises:
        UserError: the function is missing, cannot be imported, is not a function, or has unsuitable parameters.
    """
    check_function(spec, kwargs, same_python=False)
    location = locate(spec)
    module = import_module(f"reward.function {spec}", location, "_reward")
    function = vars(module).get(location.name)
    if function is None:
        raise UserError(f"reward.function {spec}: no {location.name!r} in {module.__name__}")
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else type(function).__name__
        raise UserError(f"reward.function {spec} is {kind}, but a function is needed: {signature.EXPECTED}")
    signature.check(spec, inspect.signature(function), kwargs)
    return partial(function, **kwargs)
