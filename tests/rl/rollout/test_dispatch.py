"""Which engine gets which requests."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.rl.rollout.dispatch import Dispatch
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling


def group(first: int, size: int = 1, prompt: int = 3, most: int = 10) -> list[Request]:
    return [Request(first + i, np.zeros(prompt, np.int32), i, Sampling(most)) for i in range(size)]


def waiting(dispatch: Dispatch) -> int:
    """Return the number of requests that no engine has."""
    later = (group for engine in dispatch._engines for group in engine.later)
    return sum(len(group.requests) for group in (*dispatch._waiting, *later))


def numbers(assigned: dict[int, list[Request]]) -> dict[int, list[int]]:
    return {engine: [request.number for request in requests] for engine, requests in assigned.items()}


def test_groups_stay_together_and_go_to_the_engine_with_the_fewest_requests() -> None:
    dispatch = Dispatch(engines=2, places=8)
    for first, size in ((0, 3), (10, 1), (20, 1), (30, 2)):
        dispatch.add(group(first, size))
    assert numbers(dispatch.assign()) == {0: [0, 1, 2], 1: [10, 20, 30, 31]}
    assert (dispatch.running(0), dispatch.running(1), waiting(dispatch)) == (3, 4, 0)


def test_among_equals_the_engine_with_fewer_tokens_is_next() -> None:
    dispatch = Dispatch(engines=2, places=8)
    dispatch.add(group(0, prompt=50))
    dispatch.add(group(1, prompt=20))
    dispatch.add(group(2, prompt=10))
    assert numbers(dispatch.assign()) == {0: [0], 1: [1, 2]}
    dispatch.complete(0, 0)
    dispatch.complete(1, 1)
    dispatch.add(group(3, prompt=5))
    dispatch.add(group(4, prompt=5, most=1))
    assert numbers(dispatch.assign()) == {0: [3, 4]}, "15 tokens of engine 0 are fewer than 20"


def test_earlier_waves_go_first_then_longer_prompts_then_earlier_groups() -> None:
    dispatch = Dispatch(engines=1, places=8)
    dispatch.add(group(0, prompt=9), wave=1)
    dispatch.add(group(1, prompt=2))
    dispatch.add(group(2, prompt=4))
    dispatch.add(group(3, prompt=4))
    assert numbers(dispatch.assign()) == {0: [2, 3, 1, 0]}


def test_an_engine_has_a_quarter_more_requests_than_it_computes() -> None:
    dispatch = Dispatch(engines=1, places=5)
    for number in range(20):
        dispatch.add(group(number))
    assert numbers(dispatch.assign()) == {0: [0, 1, 2, 3, 4, 5, 6]}
    assert dispatch.assign() == {} and waiting(dispatch) == 13
    dispatch.complete(0, 4)
    assert numbers(dispatch.assign()) == {0: [7]}
    assert dispatch.capacity == 7 and Dispatch(engines=3, places=4).capacity == 15


def test_requests_of_a_dead_engine_go_to_others_before_newer_ones() -> None:
    dispatch = Dispatch(engines=2, places=4)
    dispatch.add(group(0, 3, prompt=9))
    dispatch.add(group(10, 1, prompt=5))
    dispatch.assign()
    dispatch.complete(0, 1)
    dispatch.add(group(20, prompt=9))
    assert dispatch.lose(0) == 2 and dispatch.available == [1] and waiting(dispatch) == 3
    assert numbers(dispatch.assign()) == {1: [0, 2, 20]}
    assert dispatch.lose(1) == 4 and dispatch.assign() == {} and dispatch.available == []
    dispatch.restore(0)
    assert numbers(dispatch.assign()) == {0: [0, 2, 20, 10]}


def test_a_later_turn_goes_to_the_engine_of_the_earlier_one_before_new_groups_of_its_wave() -> None:
    dispatch = Dispatch(engines=2, places=2)  # an engine has up to 3 requests
    for number in range(3):
        dispatch.add(group(number))
    assert numbers(dispatch.assign()) == {0: [0, 2], 1: [1]}
    dispatch.complete(0, 0)
    dispatch.add(group(10, prompt=90), wave=9)
    dispatch.add(group(13, prompt=9), wave=9, after=0)
    dispatch.add(group(12, prompt=1), wave=9, after=0)
    dispatch.add(group(11, prompt=5), wave=7, after=0)
    assert numbers(dispatch.assign()) == {0: [11, 13], 1: [10]} and waiting(dispatch) == 1, "engine 0 is full"
    dispatch.add(group(20), wave=9)
    dispatch.complete(0, 2)
    assert numbers(dispatch.assign()) == {0: [12], 1: [20]}


def test_an_earlier_wave_goes_before_later_turns_of_others() -> None:
    """Validation does not wait for the conversations of a training."""
    dispatch = Dispatch(engines=1, places=1)  # it has up to 2 requests
    dispatch.add(group(0), wave=1, after=0)
    dispatch.add(group(1, prompt=90), wave=2)
    dispatch.add(group(2), wave=0)
    dispatch.add(group(3, prompt=1), wave=0, after=0)
    assert numbers(dispatch.assign()) == {0: [3, 2]}
    dispatch.complete(0, 2)
    dispatch.complete(0, 3)
    assert numbers(dispatch.assign()) == {0: [0, 1]}


def test_later_turns_of_a_dead_engine_go_to_others_before_new_groups() -> None:
    dispatch = Dispatch(engines=2, places=1)
    dispatch.add(group(0), after=0)
    dispatch.add(group(1), after=0)
    dispatch.add(group(2), after=0)
    assert numbers(dispatch.assign()) == {0: [0, 1]}
    assert dispatch.lose(0) == 2 and waiting(dispatch) == 3
    dispatch.add(group(3, prompt=90))
    dispatch.add(group(4), after=0)
    assert numbers(dispatch.assign()) == {1: [0, 1]}
    dispatch.complete(1, 0)
    dispatch.complete(1, 1)
    assert numbers(dispatch.assign()) == {1: [2, 4]} and waiting(dispatch) == 1


@given(
    st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(1, 5), max_size=30), st.randoms(use_true_random=False)
)
def test_every_request_is_answered_once_whatever_happens(
    engines: int, places: int, sizes: list[int], chance: random.Random
) -> None:
    dispatch = Dispatch(engines, places)
    running: dict[int, set[int]] = {engine: set() for engine in range(engines)}
    answered: list[int] = []
    bound: dict[int, int] = {}
    """Later turns -> the engine that has to get them, as long as it lives."""
    expected = 0
    left = list(sizes)
    while left or waiting(dispatch) or any(running.values()):
        event = chance.choice(["add", "complete", "complete", "lose", "restore"])
        if event == "add" and left:
            size = left.pop()
            after = chance.choice([None, chance.randrange(engines)])
            if after in dispatch.available:
                bound.update((number, after) for number in range(expected, expected + size))
            dispatch.add(group(expected, size, prompt=chance.randint(1, 9)), wave=chance.randint(0, 2), after=after)
            expected += size
        elif event == "complete" and (busy := [engine for engine in running if running[engine]]):
            engine = chance.choice(busy)
            number = chance.choice(sorted(running[engine]))
            running[engine].remove(number)
            answered.append(number)
            dispatch.complete(engine, number)
        elif event == "lose":
            engine = chance.randrange(engines)
            assert dispatch.lose(engine) == len(running[engine])
            running[engine].clear()
            bound = {number: to for number, to in bound.items() if to != engine}
        elif event == "restore":
            dispatch.restore(chance.randrange(engines))
        for engine, requests in dispatch.assign().items():
            assert engine in dispatch.available
            assert all(bound.get(request.number, engine) == engine for request in requests)
            running[engine] |= {request.number for request in requests}
        for engine in running:
            assert dispatch.running(engine) == len(running[engine])
            assert len(running[engine]) < places + -(-places // 4) + max(sizes)
        if waiting(dispatch) and not bound.keys() - {*answered, *(n for each in running.values() for n in each)}:
            assert all(len(running[engine]) >= places for engine in dispatch.available)
    assert sorted(answered) == list(range(expected))


def test_part_of_the_requests_waits_for_engines_that_are_coming() -> None:
    dispatch = Dispatch(engines=1, places=8)
    for number in range(9):
        dispatch.add(group(number))
    assert numbers(dispatch.assign(coming=2)) == {0: [0, 1, 2]}
    for number in (0, 1):
        dispatch.complete(0, number)
    assert numbers(dispatch.assign(coming=2)) == {0: [3, 4]}  # a third of the 7 that are left
    assert numbers(dispatch.assign()) == {0: [5, 6, 7, 8]}


def test_continued_responses_are_groups_of_their_own() -> None:
    """Those of one prompt differ after it, so that no engine has to take them together."""
    dispatch = Dispatch(engines=2, places=4)
    dispatch.add(group(0, size=2))
    (first,) = dispatch.assign()
    begun = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), finished=False)
    dispatch.lose(first, begun={0: begun, 1: begun})
    (second,) = {0, 1} - {first}
    assert numbers(dispatch.assign()) == {second: [0, 1]}
    dispatch.lose(second)
    dispatch.restore(first)
    dispatch.restore(second)
    assert numbers(dispatch.assign()) == {0: [0], 1: [1]}


def test_engines_come_and_go() -> None:
    dispatch = Dispatch(engines=0, places=4)
    for number in range(8):
        dispatch.add(group(number))
    assert dispatch.capacity == 0 and dispatch.assign() == {}
    first, second = dispatch.add_engine(), dispatch.add_engine()
    assert (first, second, dispatch.capacity, dispatch.assign()) == (0, 1, 10, {})
    dispatch.restore(first)
    assert numbers(dispatch.assign()) == {first: [0, 1, 2, 3, 4]}
    dispatch.withhold(first)
    dispatch.complete(first, 0)
    dispatch.add(group(8), after=first)
    assert dispatch.assign() == {} and dispatch.running(first) == 4 and dispatch.available == []
    dispatch.restore(second)
    dispatch.restore(first)
    assert numbers(dispatch.assign()) == {second: [8, 5, 6, 7]}
    assert dispatch.lose(first, is_gone=True) == 4 and dispatch.capacity == 5 and len(dispatch.present) == 1
    assert numbers(dispatch.assign()) == {second: [1]} and waiting(dispatch) == 3
