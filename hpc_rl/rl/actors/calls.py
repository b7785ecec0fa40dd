"""Calls to Ray actors, and results that become available later.

`Pending` is the only class for a deferred result in `rl/`. Its result comes from calls to actors, from a thread, or
from a value that is already known:

    pending = Pending.of_calls([ActorCall(actor.work.remote(), actor)])  # list of one result
    total = pending.then(sum)     # another Pending; nothing waits yet
    total.wait(timeout_s=60)      # waits once; further calls return the same result

All failures of Ray are translated here: a `UserError` that an actor raised is raised unchanged, and an actor that died
or did not answer becomes a `RunError` that names it, and how it ended (`hpc_rl.rl.actors.deaths`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hpc_rl.errors import RunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.deaths import ActorLabel, died

T = TypeVar("T")
U = TypeVar("U")

CALL_TIMEOUT_S = 6 * 3600
"""Default time limit of a call. Generation for a large batch may take hours; a call to a dead process ends at once."""
MODEL_LIMIT = "trainer.model_timeout_s"
"""The option that limits the start of engines and the loading of models."""
PROGRESS_S = 30
"""Interval between the lines of `wait_for_all`."""
_DEATH_NOTICE_S = 10
"""Time within which Ray reports a dead actor. The actors that computed together with it fail earlier, with a less
useful error."""


@dataclass(frozen=True)
class ActorCall:
    """One call to one actor."""

    ref: Any
    """Ray's reference to the result."""
    actor: ActorLabel


class Pending(Generic[T]):
    """A result that is computed elsewhere.

    Args:
        compute: waits for the result, at most the given number of seconds, and returns it.
        calls: the calls to actors that it waits for.
        ready: returns whether everything else that it waits for is there.
    """

    def __init__(
        self, compute: Callable[[float], T], calls: Sequence[ActorCall] = (), ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._compute = compute
        self.calls = calls
        self._ready = ready
        self._result: list[T] = []

    @staticmethod
    def of_calls(calls: Sequence[ActorCall], watched: Sequence[ActorCall] = ()) -> Pending[list[Any]]:
        """Return the results of the calls, in their order. The first failure ends the wait.

        Args:
            watched: calls that never return, to actors without which the others cannot go on: a death ends the wait.
        """
        return Pending(lambda timeout_s: _results(calls, timeout_s, watched=watched), calls)

    @staticmethod
    def of_future(future: Future[T], name: str) -> Pending[T]:
        """Return the result of a function that runs in a thread; `name` is its name for error messages."""
        return Pending(lambda timeout_s: _future_result(future, name, timeout_s), ready=future.done)

    @staticmethod
    def of_all(pending: Sequence[Pending[Any]]) -> Pending[list[Any]]:
        """Return all results, which are awaited in their order."""
        calls = [call for one in pending for call in one.calls]
        return Pending(
            lambda timeout_s: [one.wait(timeout_s) for one in pending],
            calls,
            lambda: all(one.is_ready() for one in pending),
        )

    @staticmethod
    def known(value: T) -> Pending[T]:
        """Return a value that needs no waiting."""
        return Pending(lambda _: value)

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """Return the result after `change`, which runs once, in the process and thread that waits."""
        return Pending(lambda timeout_s: change(self.wait(timeout_s)), self.calls, self._ready)

    def is_ready(self) -> bool:
        """Return whether `wait` returns at once."""
        if self._result:
            return True
        refs = [call.ref for call in self.calls]
        return self._ready() and (not refs or len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs))

    def wait(self, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Wait for the result. A second call returns the same object.

        Raises:
            UserError: an actor raised one; its message is unchanged.
            RunError: an actor died, or an actor or thread did not answer in time; the message names it.
        """
        if not self._result:
            with heart.waiting():
                self._result.append(self._compute(timeout_s))
        return self._result[0]


def wait_for_all(pending: Sequence[Pending[Any]], what: str, limit: str, timeout_s: float) -> None:
    """Wait for results of actors together, and print every PROGRESS_S seconds how many have arrived.

    Args:
        what: what the actors do, for the lines: `models`, for example.
        limit: name of the option that sets the time limit, for the error.

    Raises:
        UserError, RunError: see Pending.wait.
    """
    calls = [call for one in pending for call in one.calls]
    began = time.monotonic()

    def show(arrived: int) -> None:
        seconds = time.monotonic() - began
        print(f"waiting for the {what}: {arrived} of {len(calls)} ready, {seconds:.0f} s", flush=True)

    with heart.waiting():
        _results(calls, timeout_s, limit, show)
    for one in pending:
        one.wait()


def _results(
    calls: Sequence[ActorCall],
    timeout_s: float,
    limit: str | None = None,
    show: Callable[[int], None] | None = None,
    watched: Sequence[ActorCall] = (),
) -> list[Any]:
    # Results are taken as they arrive: after a failure the other actors may wait for the failed one forever.
    by_ref = {call.ref: call for call in (*calls, *watched)}
    wanted = {call.ref for call in calls}
    found: dict[Any, Any] = {}
    deadline = time.monotonic() + timeout_s
    left = list(by_ref)
    while wanted - found.keys():
        patience = max(0.0, deadline - time.monotonic())
        ready, left = ray.wait(left, num_returns=1, timeout=min(patience, PROGRESS_S) if show else patience)
        if not ready and show and time.monotonic() < deadline:
            show(len(found))
            heart.beat()  # until the actors have heartbeats of their own, this limit is the only one
            continue
        if not ready:
            late = ", ".join(str(by_ref[ref].actor) for ref in left if ref in wanted)
            raise RunError(f"no answer within {timeout_s:.0f} s{f' ({limit})' if limit else ''} from {late}")
        try:
            found[ready[0]] = _result(by_ref[ready[0]])
        except RayTaskError as error:
            raise _death_among([by_ref[ref] for ref in left]) or error from None
    return [found[call.ref] for call in calls]


def _future_result(future: Future[T], name: str, timeout_s: float) -> T:
    # A function that was cancelled before its start counts as unfinished for concurrent.futures.wait, but not here.
    try:
        future.exception(timeout_s)
    except TimeoutError:
        raise RunError(f"no answer within {timeout_s:.0f} s from {name}") from None
    return future.result()


def _result(call: ActorCall) -> Any:
    try:
        return ray.get(call.ref)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise died(call.actor, error) from error
    except RayError as error:
        raise RunError(f"{call.actor}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def has_died(calls: Sequence[ActorCall]) -> bool:
    """Return whether one of these actors has died. Those that do not answer within _DEATH_NOTICE_S live."""
    return _dead_among(calls) is not None


def _death_among(calls: Sequence[ActorCall]) -> RunError | None:
    """Return the error for one of these actors that died, if one did."""
    found = _dead_among(calls)
    return None if found is None else died(*found)


def _dead_among(calls: Sequence[ActorCall]) -> tuple[ActorLabel, RayActorError] | None:
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
            return by_ref[ready[0]].actor, error
        except RayError:
            continue  # an exception in the actor's code; it is alive
    return None
