from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.tracking.timeline import (
    COLOURS,
    LENT_BY,
    OTHER_COLOUR,
    PHASES,
    PhaseRow,
    cells,
    named,
    new_timeline,
    read_timeline,
    rows,
    ticks,
    write_timeline,
)

SECONDS = st.floats(-5, 25)


def test_spans_are_cut_to_the_step_joined_and_in_order() -> None:
    found = new_timeline(
        7,
        20.0,
        {
            "update_actor": [(13.0, 17.99961)],
            "gen": [(14.0, 25.0), (-3.0, 8.0), (7.5, 9.0), (21.0, 22.0)],
            "reward": [(-2.0, -1.0)],
            "unknown": [(0.0, 1.0)],
        },
    )
    assert (found.step, found.seconds) == (7, 20.0)
    assert list(found.phases.items()) == [("gen", [(0.0, 9.0), (14.0, 20.0)]), ("update_actor", [(13.0, 18.0)])]


def test_the_shortest_gaps_of_many_spans_are_closed() -> None:
    spans = [(float(start), start + 0.5) for start in range(45)]
    (found,) = new_timeline(1, 60.0, {"gen": [*spans, (50.0, 50.5)]}).phases.values()
    assert len(found) == 40
    assert found[0] == (0.0, 6.5) and found[-2:] == [(44.0, 44.5), (50.0, 50.5)]  # the first of equal gaps are closed


@given(st.lists(st.tuples(SECONDS, SECONDS).map(lambda span: (min(span), max(span))), max_size=60))
def test_any_spans_become_a_row(spans: list[tuple[float, float]]) -> None:
    timeline = new_timeline(1, 20.0, {"gen": spans})
    for (_, end), (start, _) in pairwise(timeline.phases.get("gen", [])):
        assert end <= start
    for row in rows(timeline):
        assert all(left >= 0 and width >= 0 and left + width <= 100.02 for left, width in row.bars)
    for found in timeline.phases.values():
        assert any(cells(found, 20.0, 30)) and len(cells(found, 20.0, 30)) == 30


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert read_timeline(path, 7) is None
    timeline = new_timeline(7, 20.0, {"gen": [(0.0, 8.0)], "adv": [(8.25, 8.5)]})
    write_timeline(path, timeline)
    assert json.loads(path.read_text()) == {
        "step": 7,
        "seconds": 20.0,
        "phases": {"gen": [[0, 8]], "adv": [[8.25, 8.5]]},
    }
    assert read_timeline(path, 7) == read_timeline(path, 8) == timeline
    assert read_timeline(path, 6) is None, "the run resumed from an earlier step"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"step": 1, "seconds": 2}', '{"step": 1, "seconds": 2, "phases": [1]}'),
        *(f'{{"step": 1, "seconds": {each}, "phases": {{}}}}' for each in ("0", "1e-4", "Infinity", "NaN")),
        '{"step": Infinity, "seconds": 2, "phases": {}}',
    ],
)
def test_a_damaged_file_is_no_timeline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    assert read_timeline(path, 1) is None


def test_a_file_that_cannot_be_read_is_no_timeline(tmp_path: Path) -> None:
    assert read_timeline(tmp_path, 1) is None


def test_rows() -> None:
    found = rows(new_timeline(7, 20.0, {"gen": [(0.0, 8.0), (14.0, 20.0)], "update_critic": [(11.6, 13.004)]}))
    assert found == [
        PhaseRow("generation", 0, [(0.0, 40.0), (70.0, 30.0)], "14", "0 to 8 s, 14 to 20 s"),
        PhaseRow("critic update", 9, [(58.0, 7.02)], "1.4", "11.6 to 13 s"),
    ]
    assert len({name for name, _ in PHASES.values()}) == len(PHASES)


OF_FINETUNE = {"data", "window", "forward_backward", "optimizer"}
OF_BOTH = {"save_checkpoint", "write_checkpoint", "testing"}


@pytest.mark.parametrize("phases", [OF_FINETUNE | OF_BOTH, PHASES.keys() - OF_FINETUNE, {*OF_BOTH, "unpack", "gen_x"}])
def test_no_two_phases_of_a_run_have_the_same_colour(phases: set[str]) -> None:
    found = named(phases)
    colours = [colour for _, colour in found.values()]
    assert found.keys() == phases and len({*colours, OTHER_COLOUR}) == len(colours) + 1 and max(colours) < COLOURS
    assert all(found[phase] == PHASES[phase] for phase in phases & PHASES.keys())
    assert found.get("gen_x", ("gen x", 0))[0] == "gen x"


def test_a_phase_for_which_no_colour_is_left_has_that_of_other_time() -> None:
    assert named({*PHASES, "gen_x"}) == PHASES | {"gen_x": ("gen x", OTHER_COLOUR)}


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (20.0, ["0", "5", "10", "15", "20"]),
        (0.7, ["0", "0.2", "0.4", "0.6"]),
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (6.0, ["0", "1", "2", "3", "4", "5", "6"]),
        (3601.0, ["0", "1000", "2000", "3000"]),
        (0.0, []),
    ],
)
def test_ticks(seconds: float, labels: list[str]) -> None:
    found = ticks(seconds)
    assert [label for _, label in found] == labels
    assert all(left == pytest.approx(100 * float(label) / seconds, abs=0.01) for left, label in found)


def test_a_short_span_is_one_cell() -> None:
    assert cells([(0.0, 5.0), (9.99, 10.0)], 10.0, 4) == [True, True, False, True]
    assert cells([(2.6, 2.61)], 10.0, 4) == [False, True, False, False]
    assert cells([(10.0, 10.0)], 10.0, 4) == [False, False, False, True]


def test_engines_of_each_other_job_are_a_row_below_those_of_the_job() -> None:
    lent = {f"{LENT_BY}job {job}": [(2.0, 4.0), (start, 9.0)] for job, start in (("41_2", 3.0), ("9", 8.0))}
    phases = {"reward": [(3.0, 4.0)], **lent, "gen": [(0.0, 1.0)], f"{LENT_BY}job <b>": [(0.0, 1.0)]}
    assert [(row.name, row.colour, row.times) for row in rows(new_timeline(1, 10.0, phases))] == [
        ("generation", 0, "0 to 1 s"),
        ("lent by job 9", 0, "2 to 4 s, 8 to 9 s"),
        ("lent by job 41_2", 0, "2 to 9 s"),
        ("rewards", 1, "3 to 4 s"),
    ]


def test_many_other_jobs_are_one_row(tmp_path: Path) -> None:
    path, phases = tmp_path / "timeline.json", {f"{LENT_BY}job {job}": [(job, job + 1.5)] for job in range(5)}
    write_timeline(path, new_timeline(1, 10.0, phases))
    found = read_timeline(path, 1)
    assert found is not None
    assert [(row.name, row.times) for row in rows(found)] == [("lent by 5 jobs", "0 to 5.5 s")]
