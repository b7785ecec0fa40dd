"""Requests on their way through engines in other processes, some of which die."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import ray

from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.calls import ActorCall
from hpc_rl.rl.fates import Actor, ActorDiedError
from hpc_rl.rl.rollout.engine import Sampling, Span
from hpc_rl.rl.rollout.request_queue import CALLS_AHEAD, Asked, RequestQueue
from hpc_rl.rl.weights.base import EngineActors
from tests.rl.runs.counting_engine import DIES, HANGS, REFUSES, CountingEngine
from tests.rl.runs.jobs import TIMEOUT_S

PROMPT = Prompt(np.zeros(3, np.int32), None, {}, "")


class Engines:
    """Engines, and what replaces one that has died."""

    def __init__(self, count: int, replaces: bool = True) -> None:
        self.names = [Actor(f"engine {index}", "engine") for index in range(count)]
        self.actors = EngineActors([self.new(is_first=True) for _ in range(count)], self.names, [""] * count, TIMEOUT_S)
        self.replaces = replaces
        self.deaths: list[int] = []

    def new(self, is_first: bool = False) -> Any:
        actor = ray.remote(num_cpus=0)(CountingEngine).remote(is_first)
        ray.get(actor.pid.remote(), timeout=TIMEOUT_S)
        return actor

    def replace(self, engine: int, error: ActorDiedError) -> ActorCall | None:
        self.deaths.append(engine)
        if not self.replaces:
            return None
        self.actors.actors[engine] = self.new()
        return ActorCall(self.actors.actors[engine].start.remote(), self.names[engine])


def queue_of(engines: Engines, places: int = 4, stall_s: float = TIMEOUT_S) -> RequestQueue:
    return RequestQueue(engines.actors, places, stall_s, engines.replace)


def ask(queue: RequestQueue, *seeds: int) -> Asked:
    return queue.ask(PROMPT, [(seed, Sampling(4)) for seed in seeds])


def tokens(asked: Sequence[Asked]) -> list[list[int]]:
    return [[int(completion.token_ids[0]) for completion in one.completions()] for one in asked]


def test_responses_have_the_order_of_their_requests(cluster: None) -> None:
    queue = queue_of(Engines(2))
    asked = [ask(queue, 5, 0, 3), *(ask(queue, seed) for seed in range(20))]
    assert len(queue) == 23 and not asked[0].is_complete
    queue.wait(asked)
    assert tokens(asked) == [[5, 0, 3], *([seed] for seed in range(20))]
    assert len(queue) == 0 and queue.busy_s >= 0.5 * 4 and queue.repeated == 0


def test_weights_change_only_while_it_pauses(cluster: None) -> None:
    """What runs on goes on with the next version."""
    engines = Engines(1)
    queue = queue_of(engines)
    short, long = ask(queue, 0), ask(queue, 12)
    while not short.is_complete:
        queue.turn(TIMEOUT_S)
    queue.pause()
    calls = ray.get(engines.actors.actors[0].pid.remote(), timeout=TIMEOUT_S)  # no call is before this one
    assert calls and not long.is_complete and len(queue) == 1
    queue.version = 7
    queue.wait([long])
    assert short.completions()[0].spans == (Span(0, 1),) and long.completions()[0].spans == (Span(7, 1),)


@pytest.mark.parametrize("replaces", [True, False])
def test_the_requests_of_an_engine_that_dies_are_repeated(cluster: None, replaces: bool) -> None:
    engines = Engines(2, replaces)
    queue = queue_of(engines)
    asked = [ask(queue, seed) for seed in range(30)]
    queue.turn(TIMEOUT_S)
    os.kill(ray.get(engines.actors.actors[1].pid.remote(), timeout=TIMEOUT_S), signal.SIGKILL)
    queue.wait(asked)
    assert tokens(asked) == [[seed] for seed in range(30)]
    assert engines.deaths == [1] and queue.repeated > 0


def test_requests_that_trickle_in_wait_for_the_next_call(cluster: None) -> None:
    """Each call that is ahead delays what comes after it by a slice."""
    queue = queue_of(Engines(2), places=100)
    asked = []
    for seed in range(60):
        asked.append(ask(queue, seed % 7))
        queue.turn(0.0)
        assert max(map(len, queue._calls)) <= CALLS_AHEAD
    queue.wait(asked)
    assert tokens(asked) == [[seed % 7] for seed in range(60)]


def test_an_engine_that_hangs_is_ended(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    engines = Engines(2)
    queue = queue_of(engines, stall_s=2)
    asked = [ask(queue, HANGS), *(ask(queue, 1) for _ in range(8))]
    queue.wait(asked)
    assert tokens(asked) == [[HANGS], *([[1]] * 8)] and 0 in engines.deaths
    assert "engine 0 has not answered for" in capsys.readouterr().out


def test_a_request_that_kills_every_engine_ends_the_run(cluster: None) -> None:
    queue = queue_of(Engines(2, replaces=False))
    with pytest.raises(RunError, match="no rollout engine is left"):
        queue.wait([ask(queue, DIES)])


def test_a_refused_request_is_the_users_mistake(cluster: None) -> None:
    queue = queue_of(Engines(1))
    with pytest.raises(UserError, match=r"^too long$"):
        queue.wait([ask(queue, REFUSES)])


def test_a_later_turn_goes_to_the_engine_of_the_earlier_one(cluster: None) -> None:
    queue = queue_of(Engines(2))
    first = [ask(queue, 0) for _ in range(6)]
    queue.wait(first)
    engines = [one.engines[one.requests[0].number] for one in first]
    assert {*engines} == {0, 1}
    later = [queue.ask(PROMPT, [(1, Sampling(4))], 0, engine) for engine in engines]
    queue.wait(later)
    assert [one.engines[one.requests[0].number] for one in later] == engines
