"""Calls of Ray actors that the driver waits for when it wants to, and what goes wrong with them in one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hpc_rl.errors import RunError, UserError

T = TypeVar("T")

CALL_TIMEOUT_S = 6 * 3600
"""Longest time for one call: generation for a large batch may take long, and a dead process ends a call at once."""
_DEATH_NOTICE_S = 10
"""Within which Ray tells of a dead actor. Those that computed together with it fail at once, and say less."""


@dataclass(frozen=True)
class Called:
    """One call of one actor."""

    ref: Any
    who: str
    """The actor, for errors: `rank 1 of pool train (log: ...)`."""


class Pending(Generic[T]):
    """The results of a fan-out that is under way."""

    def __init__(self, calls: Sequence[Called], combine: Callable[[list[Any]], T]) -> None:
        self._calls = list(calls)
        self._combine = combine

    def wait(self, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """All results, combined.

        Raises:
            UserError: an actor raised one; its message.
            RunError: an actor died or did not answer in time; says which.
        """
        return self._combine(results(self._calls, timeout_s))


def results(calls: Sequence[Called], timeout_s: float) -> list[Any]:
    """The result of every call, in order. The first failure ends the wait: others may wait for the one that died."""
    by_ref = {call.ref: call for call in calls}
    found: dict[Any, Any] = {}
    deadline = time.monotonic() + timeout_s
    left = list(by_ref)
    while left:
        ready, left = ray.wait(left, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunError(f"no answer within {timeout_s:.0f} s from {', '.join(by_ref[ref].who for ref in left)}")
        try:
            found[ready[0]] = _result(by_ref[ready[0]])
        except RayTaskError as error:
            raise _death_among([by_ref[ref] for ref in left]) or error from None
    return [found[call.ref] for call in calls]


def _result(call: Called) -> Any:
    try:
        return ray.get(call.ref)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise _died(call, error) from error
    except RayError as error:
        raise RunError(f"{call.who}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def _death_among(calls: Sequence[Called]) -> RunError | None:
    """The error of one of these actors that died."""
    by_ref = {call.ref: call for call in calls}
    deadline = time.monotonic() + _DEATH_NOTICE_S
    left = list(by_ref)
    while left:
        ready, left = ray.wait(left, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        try:
            ray.get(ready[0])
        except RayActorError as error:
            return _died(by_ref[ready[0]], error)
        except RayError:
            continue  # it failed as the first one did
    return None


def _died(call: Called, error: RayActorError) -> RunError:
    first = str(error).strip().splitlines()[0]
    return RunError(
        f"{call.who} died ({first}); usually for lack of memory: lower trainer.micro_tokens, or ask for more --mem"
    )
