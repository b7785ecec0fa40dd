"""A process that scores: python -m hpc_rl.rewards.worker FD, started and ended by hpc_rl.rewards.pool.

FD is a socket. It gets (spec, kwargs) and answers with the names of the extras that the function wants, or with the
UserError that loading it raised. Then it gets lists of calls, and answers each call for itself: an owner that has n
answers knows that call n is the one that hangs.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.host.processes import die_with_parent
from hpc_rl.rewards import signature
from hpc_rl.rewards.load import load_function
from hpc_rl.rewards.number import to_score

Call = tuple[str, Any, dict[str, Any]]
"""Response, reference answer, and the extras."""
Result = tuple[float, str | None]
"""A score, or NaN and what went wrong in one line."""


def failed(message: str) -> Result:
    """The result of a call that gave no score."""
    return math.nan, " ".join(message.split())[:300]


def result_of(function: Callable[..., Any], call: Call) -> Result:
    response, answer, given = call
    try:
        return to_score(function(response, answer, **given)), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
        return failed(f"{type(error).__name__}: {error}")


def main(fd: int) -> None:
    die_with_parent()
    connection: Connection[Any, Any] = Connection(fd)
    spec, kwargs = connection.recv()
    try:
        function = load_function(spec, kwargs)
    except UserError as error:
        connection.send(error)
        return
    connection.send(signature.extras(inspect.signature(function)))
    while True:
        try:
            calls: list[Call] = connection.recv()
        except EOFError:
            return
        for call in calls:
            connection.send(result_of(function, call))


if __name__ == "__main__":
    main(int(sys.argv[1]))
