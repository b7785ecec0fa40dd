"""Deferred results that need no cluster; tests/rl/runs/test_calls.py has those of actors."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from hpc_rl.errors import RunError
from hpc_rl.rl.actors.calls import Pending


def test_a_change_runs_once_and_later() -> None:
    seen: list[int] = []

    def double(value: int) -> list[int]:
        seen.append(value)
        return [2 * value]

    pending = Pending.known(3).then(double)
    assert seen == []
    assert pending.wait() is pending.wait()
    assert pending.wait() == [6]
    assert seen == [3]


def test_the_time_limit_reaches_what_computes() -> None:
    limits: list[float] = []
    Pending(limits.append).then(str).wait(timeout_s=7.0)
    assert limits == [7.0]


def test_a_failure_is_not_remembered_as_a_result() -> None:
    attempts = iter([ZeroDivisionError(), None])

    def compute(_timeout_s: float) -> int:
        if (error := next(attempts)) is not None:
            raise error
        return 1

    pending = Pending(compute)
    with pytest.raises(ZeroDivisionError):
        pending.wait()
    assert pending.wait() == 1


def test_a_thread_that_does_not_answer_is_named() -> None:
    future: Future[int] = Future()
    pending = Pending.of_future(future, "the reward")
    with pytest.raises(RunError, match=r"^no answer within 0 s from the reward$"):
        pending.wait(0)
    future.set_result(4)
    assert pending.wait(0) == 4


def test_what_is_cancelled_before_its_start_ends_the_wait() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(release.wait, 60)
        pending = Pending.of_future(threads.submit(int), "the reward")
        threads.shutdown(wait=False, cancel_futures=True)
        try:
            with pytest.raises(CancelledError):
                pending.wait(30)
        finally:
            release.set()


def test_the_error_of_a_thread_comes_out_as_it_was() -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        Pending.of_future(future, "the reward").wait(1)
