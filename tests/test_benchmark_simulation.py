"""Engines on a virtual clock, and runs of many of them: times that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import rollout, rollout_simulation
from benchmarks.rollout_simulation import BASE, VARIANTS, Simulation, Variant, configuration
from benchmarks.virtual_engines import VirtualEngine, VirtualQueue
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.rollout.engine import Sampling, Span


def step_s(rows: int) -> float:
    return 1.0 + rows


def test_an_engine_needs_longer_steps_for_more_responses() -> None:
    engine = VirtualEngine(places=2, step_s=step_s)
    engine.add(10.0, [(0, 4), (1, 2), (2, 1)])
    # 2 steps of 2 responses, 1 step of 2 others, and the last one alone.
    assert engine.due == 16.0
    assert engine.advance(15.0) == [] and engine.busy_s == 5.0
    assert engine.advance(19.0) == [(1, (Span(0, 2),)), (2, (Span(0, 1),))]
    assert engine.advance(50.0) == [(0, (Span(0, 4),))] and engine.busy_s == 11.0


def test_other_weights_stop_an_engine_and_compute_its_tokens_again() -> None:
    engine = VirtualEngine(places=2, step_s=step_s)
    engine.add(0.0, [(0, 4), (1, 4)])
    engine.change_weights(6.0, 5.0, version=1, token_s=0.5)
    assert engine.advance(18.9) == [] and engine.due == 6 + 5 + 2 * 2 * 0.5 + 2 * 3
    assert engine.advance(19.0) == [(0, (Span(0, 2), Span(1, 2))), (1, (Span(0, 2), Span(1, 2)))]
    assert engine.busy_s == 6 + 2 + 6


@pytest.mark.parametrize("equal_parts, expected", [(True, 33.0), (False, 21.0)])
def test_equal_parts_wait_for_the_slowest_engine(equal_parts: bool, expected: float) -> None:
    queue = VirtualQueue(2, 1, lambda rows: 1.0, [20, 12, 1, 1, 1, 1], equal_parts)
    for _ in range(6):
        queue.ask(Prompt(np.zeros(1, np.int32), "", {}, ""), [(0, Sampling(20))])
    now = 0.0
    while len(queue):
        queue.assign(now)
        now = queue.due
        queue.collect(now)
    assert now == expected and queue.complete_groups == 6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    for name, value in {"PROMPTS": 8, "N": 2, "PLACES": 4}.items():
        monkeypatch.setattr(rollout_simulation, name, value)
    return rollout_simulation.draw_lengths(16 * 12)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_simulated_run_keeps_the_bound_and_repeats(variant: Variant, small: list[int]) -> None:
    config = configuration(variant.staleness)
    found = Simulation(config, variant, 2, small).run()
    assert found == Simulation(config, variant, 2, small).run()
    assert found.mean_staleness <= found.max_staleness == variant.staleness
    assert 0 <= found.engines_idle < 1 and 0 < found.trainer_idle < 1
    if variant.partial:
        assert found.step_s <= 1.05 * Simulation(config, replace(variant, partial=False), 2, small).run().step_s


def test_staleness_hides_the_generation(small: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes as long as generation, on any number of GPUs."""
    for name, seconds in {"OWN_UPDATE": 60.0, "SHARED_UPDATE": 60.0, "OLD_LOGPROBS": 0.0}.items():
        monkeypatch.setattr(rollout_simulation, name, (seconds, 0.0))
    outcomes = {each.name: Simulation(configuration(each.staleness), each, 2, small).run() for each in VARIANTS}
    assert outcomes["staleness 4, partial"].step_s < 0.8 * outcomes[BASE].step_s


def test_lengths_have_the_mean_and_the_tail_of_the_distribution() -> None:
    lengths = rollout.response_lengths(10_000)
    assert np.mean(lengths) == pytest.approx(rollout.MEAN, rel=0.02)
    assert np.quantile(lengths, 0.99) == pytest.approx(rollout.MOST, rel=0.01)
    assert max(lengths) == rollout.MAX_RESPONSE and sorted(lengths) != lengths
