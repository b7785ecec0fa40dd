"""The simulation of lent engines: times that can be computed by hand, and small runs with the real queue."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks import lenders
from benchmarks.lenders import Outcome, Variant, rows_of, simulate
from benchmarks.virtual_ray import Copies, overlap, stays


def test_nodes_are_lent_for_the_expected_part_of_the_time() -> None:
    found = stays(400, 300.0, 100.0, 4000.0, np.random.default_rng(0))
    assert sum(overlap(stay.begin, stay.end, [(1000.0, 2000.0)]) for stay in found) / 400_000 == pytest.approx(
        0.75, abs=0.02
    )
    assert stays(2, math.inf, 100.0, 4000.0, np.random.default_rng(0)) == [(0.0, math.inf)] * 2


@pytest.mark.parametrize("one_source, times", [(False, [16, 22, 22, 28, 28, 28, 28]), (True, range(16, 53, 6))])
def test_copies_double_unless_all_come_from_one_node(one_source: bool, times: list[int]) -> None:
    copies = Copies(10.0, 6.0, one_source)
    assert [copies.reach(node, 0.0, math.inf) for node in range(7)] == list(times)
    assert copies.reach(0, 20.0, math.inf) == 20.0 and copies.reach(6, 20.0, math.inf) == times[-1]


def test_a_node_that_leaves_serves_nobody() -> None:
    copies = Copies(0.0, 6.0)
    assert copies.reach(0, 0.0, leaves=11.0) == 6.0
    assert [copies.reach(node, 0.0, math.inf) for node in (1, 2, 3)] == [12.0, 18.0, 18.0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPTS_EACH": 16, "N": 2, "PLACES": 4, "LOAD_S": 5.0}.items():
        monkeypatch.setattr(lenders, name, value)
    monkeypatch.setitem(lenders.LIVES, "5 min", 60.0)
    monkeypatch.setattr(Variant, "steps", property(lambda _: 2))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("own", [0, 4])
def test_a_simulated_run_survives_departures(own: int, staleness: int) -> None:
    variant = Variant(8, own, staleness, "5 min")
    found = simulate(variant)
    assert replace(found, driver_share=0.0) == replace(simulate(variant), driver_share=0.0)
    steady, moving = simulate(replace(variant, life="stay")), simulate(replace(variant, moves=True))
    assert found.departures and found.repeated and 0 < found.lost < 1 and not steady.lost
    assert 0 < found.efficiency < 1 and 0 < steady.efficiency < 1 and moving.lost < found.lost
    assert 0 < found.weights_s <= found.last_weights_s and found.first_request_s > lenders.LOAD_S


def test_a_row_compares_with_the_same_engines_that_stay() -> None:
    steady = Outcome(400.0, 0.8, 0.0, 0.0, 0.0, 9.0, 12.0, 0.01, 0, 0, 8.0)
    moves, stays_, leaves = (Variant(8, life=life, moves=life == "5 min") for life in ("5 min", "stay", "60 min"))
    lost = replace(steady, efficiency=0.6, lost=0.125, loading=0.1, first_request_s=72.4)
    results = {stays_.name: asdict(steady), leaves.name: asdict(lost), moves.name: asdict(lost)}
    assert [row[:4] for row in rows_of(results)] == [
        ["8, synchronous, stay", "400", "0.80", ""],
        ["8, synchronous, 60 min", "400", "0.60", "0.75"],
        ["8, synchronous, moves, 5 min", "400", "0.60", "0.75"],
    ]
    assert rows_of(results)[1][4:] == ["12.5 %", "10 %", "72", "9", "12", "1.0 %"]
