from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_rl.tracking.samples import (
    TextSample,
    chosen_responses,
    excerpts_of_run,
    excerpts_of_runs,
    read_samples,
    records_training_samples,
    spread,
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sample(step: int, split: str, prompt: str, response: str, score: float | None = 1.0) -> TextSample:
    return TextSample(step, split, prompt, response, "", score)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    def row(step: int, split: str, response: str) -> dict[str, Any]:
        return {"step": step, "split": split, "prompt": "p", "response": response, "answer": None, "score": 1}

    rows = [row(5, "train", "a"), row(5, "val", "a"), row(10, "train", "b"), row(10, "train", "c"), row(10, "val", "b")]
    again = [row(10, "train", "b"), row(10, "train", "c"), row(10, "val", "d")]
    for extra, expected in (
        ([], ["5train a", "5val a", "10train b", "10train c", "10val b"]),
        (again, ["5train a", "5val a", "10train b", "10train c", "10val d"]),
        ([row(6, "val", "e")], ["5train a", "5val a", "6val e"]),
    ):
        found = read_samples(write(tmp_path / "s.jsonl", rows + extra))
        assert [f"{s.step}{s.split} {s.response}" for s in found] == expected


def test_what_is_not_a_sample_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"step": 1, "prompt": "p"}\n[1]\n{"step": "x"}\n{"step": 2, "score": NaN}\n{"step": 3, "pro')
    first, second = read_samples(path)
    assert (first.split, first.prompt, first.score, second.step, second.score) == ("val", "p", None, 2, None)
    assert read_samples(tmp_path / "none") == []


def test_validation_is_spread_over_time_and_repeats_are_merged() -> None:
    samples = [sample(step, "val", "p", "a" if step < 50 else "b") for step in range(0, 101, 5)]
    (group,) = excerpts_of_run(samples)
    assert group.excerpts[0].rows == [("0 to 40", "a", "1"), ("60 to 100", "b", "1")]
    assert spread(range(100), 5) == {0, 25, 50, 74, 99}


def test_training_shows_one_prompt_of_each_of_some_steps() -> None:
    samples = [
        sample(step, "train", f"{prompt}{step}", response, score)
        for step in range(1, 21)
        for prompt in ("p", "q")
        for response, score in (("good", 1.0), ("bad", 0.0))
    ]
    (group,) = excerpts_of_run(samples)
    assert group.title == "Responses in training, best and worst"
    assert [excerpt.prompt for excerpt in group.excerpts] == ["p1", "p5", "p9", "p12", "p16", "p20"]
    assert group.excerpts[0].rows == [("1", "good", "1"), ("1", "bad", "0")]


def test_runs_are_compared_by_prompts_that_they_share() -> None:
    one = [sample(1, "val", "p", "old"), sample(2, "val", "p", "new"), sample(2, "val", "own", "x")]
    two = [sample(9, "val", "p", "other", None), sample(9, "train", "own", "x")]
    (group,) = excerpts_of_runs([("a", one), ("b", two)])
    (excerpt,) = group.excerpts
    assert excerpt.rows == [("a, step 2", "new", "1"), ("b, step 9", "other", "–")]
    assert excerpts_of_runs([("a", one), ("b", [])]) == []


def test_which_training_steps_are_recorded() -> None:
    assert [step for step in range(1, 11) if records_training_samples(step, 10)] == list(range(1, 11))
    recorded = [step for step in range(1, 1001) if records_training_samples(step, 1000)]
    assert recorded[:3] == [1, 20, 40] and recorded[-1] == 1000 and len(recorded) == 51
    assert records_training_samples(999, 999) and not records_training_samples(998, 999)


def test_the_best_and_the_worst_response_of_the_first_prompts_are_recorded() -> None:
    groups, scores = [0, 0, 0, 4, 4, 7, 7], [0.5, 1.0, 0.0, 1.0, 1.0, 3.0, 4.0]
    assert chosen_responses(groups, scores) == [1, 2, 3]
    assert chosen_responses([0], [0.0]) == [0]
