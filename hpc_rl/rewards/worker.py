"""A process that scores: python -P -m hpc_rl.rewards.worker FD, started and ended by hpc_rl.rewards.processes.

FD is a socket. The process receives (spec, kwargs) of each function, loads the functions, and sends the names of the
extra parameters that each one takes, or the UserError that loading raised. Then it receives calls, and sends the result
of each.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from hpc_rl.errors import UserError
from hpc_rl.rewards import signature
from hpc_rl.rewards.check import check_function, locate
from hpc_rl.rewards.number import split_reward
from hpc_rl.software.user_code import import_module
from hpc_rl.system.processes import die_with_parent
from hpc_rl.system.search_path import look_last

Call = tuple[int, str, Any, dict[str, Any]]
"""Number of the function, response, reference answer, and the extra parameters."""


class Result(NamedTuple):
    """What one call returned."""

    score: float
    """NaN if the call failed."""
    error: str | None = None
    """The reason of a failure, in one line."""
    components: dict[str, float] = {}  # noqa: RUF012 - never changed
    """Further numbers that the reward reported."""


def succeeded(value: object) -> Result:
    """Return the result of a call that returned `value`. Raises ValueError if it holds no score."""
    score, components = split_reward(value)
    return Result(score, None, components)


def failed(message: str) -> Result:
    """Return the result of a call that gave no score."""
    return Result(math.nan, " ".join(message.split())[:300])


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


def result_of(functions: Sequence[Callable[..., Any]], call: Call) -> Result:
    """Call the function, and turn anything that it raises into a failure."""
    number, response, answer, extras = call
    try:
        return succeeded(functions[number](response, answer, **extras))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
        return failed(f"{type(error).__name__}: {error}")


def main(fd: int) -> None:
    """Load the functions, then score until the socket is closed."""
    die_with_parent()
    look_last()
    connection: Connection[Any, Any] = Connection(fd)
    try:
        functions = [load_function(spec, kwargs) for spec, kwargs in connection.recv()]
    except UserError as error:
        connection.send(error)
        return
    connection.send([signature.extras(inspect.signature(function)) for function in functions])
    while True:
        try:
            call: Call = connection.recv()
        except EOFError:
            return
        connection.send(tuple(result_of(functions, call)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
