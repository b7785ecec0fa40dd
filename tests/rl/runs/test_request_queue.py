"""Requests on their way through engines in other processes, some of which die."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors.calls import ActorCall
from hpc_rl.rl.actors.deaths import ActorDiedError, ActorLabel
from hpc_rl.rl.rollout.engine import Sampling, Span
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.request_queue import CALLS_AHEAD, RequestQueue
from hpc_rl.rl.rollout.rollout import MOST_DEATHS
from hpc_rl.rl.weights.base import EngineActors
from tests.marks import long
from tests.rl.runs.counting_engine import DIES, HANGS, LACKS_MEMORY, REFUSES, CountingEngine
from tests.rl.runs.jobs import TIMEOUT_S

PROMPT = Prompt(np.zeros(3, np.int32), None, {}, "")


class Engines:
    """Engines, and what replaces one that has died.

    Args:
        starts: how the engines start that replace others; see CountingEngine.
    """

    def __init__(self, count: int, starts: str = "") -> None:
        self.names = [ActorLabel(f"engine {index}", "engine") for index in range(count)]
        self.actors = EngineActors([self.new(is_first=True) for _ in range(count)], self.names, [""] * count, TIMEOUT_S)
        self._starts = starts
        self.deaths: list[int] = []

    def new(self, is_first: bool = False) -> Any:
        actor = ray.remote(num_cpus=0)(CountingEngine).remote(is_first)
        ray.get(actor.pid.remote(), timeout=TIMEOUT_S)
        return actor

    def replace(self, engine: int, error: Exception) -> ActorCall:
        self.deaths.append(engine)
        if self.deaths.count(engine) > MOST_DEATHS:
            raise error
        before, self.actors.actors[engine] = self.actors.actors[engine], self.new()
        with pytest.raises(RayActorError):
            ray.get(before.pid.remote(), timeout=TIMEOUT_S)
        return ActorCall(self.actors.actors[engine].start.remote(self._starts), self.names[engine])


def queue_of(
    engines: Engines, places: int = 4, stall_s: float = TIMEOUT_S, start_s: float = TIMEOUT_S, **more: Any
) -> RequestQueue:
    return RequestQueue(engines.actors, places, stall_s, start_s, engines.replace, **more)


def ask(queue: RequestQueue, *seeds: int) -> QueuedResponses:
    return queue.ask(PROMPT, [(seed, Sampling(4)) for seed in seeds])


def tokens(asked: Sequence[QueuedResponses]) -> list[list[int]]:
    return [[int(completion.token_ids[0]) for completion in one.completions()] for one in asked]


def test_responses_have_the_order_of_their_requests(cluster: None) -> None:
    queue = queue_of(Engines(2))
    asked = [ask(queue, 5, 0, 3), *(ask(queue, seed) for seed in range(20))]
    assert not asked[0].is_complete
    queue.wait(asked)
    assert tokens(asked) == [[5, 0, 3], *([seed] for seed in range(20))]
    assert queue.busy_s >= 0.5 * 4 and queue.repeated == 0


def test_weights_change_only_while_it_pauses(cluster: None) -> None:
    """What runs on goes on with the next version."""
    engines = Engines(1)
    queue = queue_of(engines)
    short, long = ask(queue, 0), ask(queue, 12)
    while not short.is_complete:
        queue.turn(TIMEOUT_S)
    queue.pause()
    calls = ray.get(engines.actors.actors[0].pid.remote(), timeout=TIMEOUT_S)  # no call is before this one
    assert calls and not long.is_complete
    queue.version = 7
    queue.wait([long])
    assert short.completions()[0].spans == (Span(0, 1),) and long.completions()[0].spans == (Span(7, 1),)


def kill(engines: Engines, engine: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(ray.get(engines.actors.actors[engine].pid.remote(), timeout=TIMEOUT_S), how)


@pytest.mark.parametrize("starts", [long(""), "hangs"])
def test_the_requests_of_an_engine_that_dies_are_repeated(cluster: None, starts: str) -> None:
    """Also by the other one alone, while the successor loads its model."""
    engines = Engines(2, starts)
    queue = queue_of(engines)
    asked = [ask(queue, seed) for seed in range(30)]
    queue.turn(TIMEOUT_S)
    kill(engines, 1)
    queue.wait(asked)
    assert tokens(asked) == [[seed] for seed in range(30)]
    assert engines.deaths == [1] and queue.repeated > 0


@pytest.mark.parametrize("ends", [long(signal.SIGKILL), signal.SIGSTOP], ids=["dies", "hangs"])
def test_an_engine_that_ended_without_a_request_is_replaced(cluster: None, ends: signal.Signals) -> None:
    engines = Engines(2)
    queue = queue_of(engines)
    assert queue.tell("answer") and engines.deaths == []
    kill(engines, 1, ends)
    if ends == signal.SIGSTOP:
        queue._stall_s = 2  # on a slow machine, the other one may be late too
    assert not queue.tell("answer")
    queue._stall_s = TIMEOUT_S
    assert 1 in engines.deaths and 1 not in queue.loaded and queue.repeated == 0
    queue.wait_for_starts()
    assert queue.tell("answer") and queue.loaded == [0, 1]


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
    engines = Engines(2)
    queue = queue_of(engines)
    with pytest.raises(ActorDiedError, match=r"^engine [01] died: killed"):
        queue.wait([ask(queue, DIES)])
    assert max(map(engines.deaths.count, (0, 1))) == MOST_DEATHS + 1


@pytest.mark.long
@pytest.mark.parametrize(("starts", "error"), [("refuses", "^no such model$"), ("raises", "no free memory$")])
def test_engines_that_cannot_start_in_the_place_of_another_are_counted(cluster: None, starts: str, error: str) -> None:
    engines = Engines(1, starts)
    queue = queue_of(engines)
    with pytest.raises((UserError, RayTaskError), match=error):
        queue.wait([ask(queue, DIES)])
    assert engines.deaths == [0] * (MOST_DEATHS + 1)


def test_engines_that_die_at_their_start_are_counted(cluster: None) -> None:
    engines = Engines(1, "dies")
    queue = queue_of(engines)
    with pytest.raises(ActorDiedError, match=r"^engine 0 died: killed"):
        queue.wait([ask(queue, DIES)])
    assert engines.deaths == [0] * (MOST_DEATHS + 1)


def test_an_engine_that_takes_too_long_to_start_ends_the_run(cluster: None) -> None:
    queue = queue_of(Engines(1, "hangs"), start_s=1)
    with pytest.raises(RunError, match=r"^no answer within 1 s \(trainer.model_timeout_s\) from engine 0$"):
        queue.wait([ask(queue, DIES)])


def test_an_engine_that_needs_weights_gets_no_request_before_it_has_them(cluster: None) -> None:
    def revive() -> None:
        assert queue.loaded == [0] and queue.started == {0} and not revived
        revived.append(queue.is_stranded)
        queue.version = 9
        queue.restore(0)

    revived: list[bool] = []
    engines = Engines(1)
    queue = queue_of(engines, revive=revive)
    asked = ask(queue, 12)
    queue.turn(TIMEOUT_S)
    kill(engines, 0)
    queue.wait([asked])
    assert revived == [True] and asked.completions()[0].spans == (Span(9, 1),) and not queue.started


def test_a_refused_request_is_the_users_mistake(cluster: None) -> None:
    queue = queue_of(Engines(1))
    with pytest.raises(UserError, match=r"^too long$"):
        queue.wait([ask(queue, REFUSES)])


def test_what_only_a_lent_engine_refuses_is_no_matter_of_the_run(cluster: None) -> None:
    queue = without_engines()
    Lent(queue).admit()
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


class Lent:
    """Engines of other jobs: each loads its model, and then takes the weights of each version."""

    stall_s = TIMEOUT_S

    def __init__(self, queue: RequestQueue, starts: str = "") -> None:
        self._queue, self._starts = queue, starts
        self.actors: dict[int, Any] = {}
        self.version: dict[int, int | None] = {}
        self.losses: list[tuple[int, int]] = []
        """Engines that have ended, and how many of their requests were repeated."""
        self.continued: dict[int, int] = {}
        """By engine whose node has left: how many responses others continue."""
        queue.lenders = self

    def look(self) -> None: ...

    def admit(self, is_first: bool = True) -> int:
        actor, name = ray.remote(num_cpus=0)(CountingEngine).remote(is_first), ActorLabel("a lent engine", "engine")
        engine = self._queue.admit(actor, name, "", f"gen/job {len(self.actors)}")
        self.actors[engine], self.version[engine] = actor, None
        self._queue.prepare(engine)
        return engine

    def next_call(self, engine: int) -> ActorCall | None:
        if self.version[engine] == self._queue.version:
            self._queue.restore(engine)
            return None
        self.version[engine] = self._queue.version
        how = "" if self.version[engine] else self._starts
        return ActorCall(self.actors[engine].start.remote(how), ActorLabel("a lent engine", "engine"))

    def left(self, engine: int, error: Exception | None, repeated: int, continued: int) -> None:
        self.losses.append((engine, repeated))
        if error is None:
            self.continued[engine] = continued


def without_engines(**settings: Any) -> RequestQueue:
    return queue_of(Engines(0), **settings)


def test_a_lent_engine_comes_while_requests_wait_and_leaves_without_a_successor(cluster: None) -> None:
    queue = without_engines()
    lent = Lent(queue)
    asked = [ask(queue, seed) for seed in range(12)]
    queue.turn(0.0)
    assert queue.capacity == 0 and not any(one.is_complete for one in asked)
    queue.turn(0.1)
    assert queue.busy_s >= 0.1  # no engine is idle
    first = lent.admit()
    while not asked[0].is_complete:
        queue.turn(TIMEOUT_S)
    second = lent.admit()
    assert queue.capacity == 10
    os.kill(ray.get(lent.actors[first].pid.remote(), timeout=TIMEOUT_S), signal.SIGKILL)
    queue.wait(asked)
    assert tokens(asked) == [[seed] for seed in range(12)]
    assert [engine for engine, _ in lent.losses] == [first] and lent.losses[0][1] == queue.repeated > 0
    assert 0 < queue.lost_tokens <= 7 * queue.repeated  # as far as the engine has told them
    assert queue.capacity == 5 and queue.tokens[first] + queue.tokens[second] == 12 and queue.loaded == []
    assert queue.own == 0 and queue.spans.take().keys() == {"gen/job 0", "gen/job 1"}


def test_other_engines_continue_the_responses_of_a_node_that_leaves(cluster: None) -> None:
    queue = without_engines()
    lent = Lent(queue)
    first = lent.admit()
    asked = [ask(queue, seed) for seed in (8, 8, 8, 8, 0)]
    while not asked[-1].is_complete:
        queue.turn(TIMEOUT_S)
    ray.get(lent.actors[first].leave.remote(), timeout=TIMEOUT_S)
    second = lent.admit()
    queue.wait(asked)
    assert lent.losses == [(first, 2)] and lent.continued == {first: 2} and queue.repeated == 2
    assert [one.completions()[0].token_ids.tolist() for one in asked] == [[8], [9, 9], [8], [9, 9], [0]]
    assert asked[1].completions()[0].spans == (Span(0, 2),) and queue.lost_tokens == 0
    assert (queue.tokens[first], queue.tokens[second]) == (3, 4)
    with pytest.raises(RayActorError):
        ray.get(lent.actors[first].pid.remote(), timeout=TIMEOUT_S)


def test_a_lent_engine_continues_only_with_the_newest_weights(cluster: None) -> None:
    queue = without_engines()
    lent = Lent(queue)
    lent.admit()
    asked = [ask(queue, 0), ask(queue, 12)]
    while not asked[0].is_complete:
        queue.turn(TIMEOUT_S)
    queue.pause()
    queue.version = 4
    queue.withhold_lent()
    queue.wait(asked)
    assert [one.completions()[0].spans for one in asked] == [(Span(0, 1),), (Span(4, 1),)]


@pytest.mark.parametrize(("usual_s", "own"), [(TIMEOUT_S, 4), (0.0, 8)])
def test_part_of_the_requests_waits_for_a_lent_engine_that_takes_weights(
    cluster: None, usual_s: float, own: int
) -> None:
    """As long as it takes as usual: then the engine of the run has them all."""
    queue = queue_of(Engines(1), places=8)
    queue._loads_s[Lent(queue, "hangs").admit()] = usual_s
    for _ in range(8):
        ask(queue, 30)
    queue.turn(0.0)
    assert queue._dispatch.running(0) == own


def test_the_run_waits_only_for_the_start_of_its_own_engines(cluster: None) -> None:
    queue = queue_of(Engines(1))
    Lent(queue, "hangs").admit()
    assert queue.tell("answer")
    queue.wait_for_starts()


@pytest.mark.parametrize("hangs", ["at its start", "with requests"])
def test_a_lent_engine_that_hangs_is_given_up(cluster: None, hangs: str) -> None:
    at_start = hangs == "at its start"
    queue = queue_of(Engines(1), start_s=1 if at_start else TIMEOUT_S)
    lent = Lent(queue, "hangs" if at_start else "")
    engine = lent.admit()
    while not at_start and engine in queue._starting:
        queue.turn(TIMEOUT_S)
    asked = [ask(queue, 12) for _ in range(6)]
    queue.turn(0.0)
    if not at_start:
        os.kill(ray.get(lent.actors[engine].pid.remote(), timeout=TIMEOUT_S), signal.SIGSTOP)
        lent.stall_s = 1
    queue.wait(asked)
    while not lent.losses:
        queue.turn(0.1)
    assert tokens(asked) == [[12]] * 6 and lent.losses == [(engine, 0 if at_start else queue.repeated)]
    assert (queue.repeated > 0) == (not at_start)


def test_too_little_memory_of_a_lent_engine_is_no_matter_of_the_run(cluster: None) -> None:
    queue = without_engines()
    lent = Lent(queue)
    first = lent.admit()
    asked = [ask(queue, seed) for seed in (LACKS_MEMORY, 3, 3)]
    while not lent.losses:
        queue.turn(TIMEOUT_S)
    assert lent.losses == [(first, 3)]
    lent.admit(is_first=False)
    queue.wait(asked)
    assert tokens(asked) == [[LACKS_MEMORY], [3], [3]]
    own = queue_of(Engines(1))
    with pytest.raises(RunError, match=r"^out of memory$"):
        own.wait([ask(own, LACKS_MEMORY)])
