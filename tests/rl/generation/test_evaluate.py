"""eval.json: what is counted, and what the estimates are of."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import EvalConfig
from hpc_rl.errors import RunError
from hpc_rl.rl.generation import evaluate as module
from hpc_rl.rl.generation.evaluate import evaluate, evaluate_run, extraction
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.evaluations import evaluation_table, evaluation_text


def rows(groups: list[list[tuple[str, float | None]]], data: str = "a.jsonl") -> list[dict[str, Any]]:
    return [
        {"data": data, "index": i, "response": text, "score": score, "finish": "stopped", "tokens": 2}
        for i, group in enumerate(groups)
        for text, score in group
    ]


GROUPS: list[list[tuple[str, float | None]]] = [
    [("#### 1", 1.0), ("#### 1", 1.0), ("#### 2", 0.0), ("#### 3", 0.0)],
    [("#### 2", 0.0), ("#### 2", 0.0), ("#### 1", 1.0), ("?", None)],
]


def test_means_pass_and_majority() -> None:
    found = evaluate(rows(GROUPS), 1.0, extraction("gsm8k"), seed=1)
    values = {name: metric["value"] for name, metric in found["metrics"].items()}
    assert values["score"] == pytest.approx((0.5 + 1 / 3) / 2) == values["pass@1"]
    assert values["pass@2"] == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert values["pass@4"] == values["maj@4"] == 1.0, "only the first prompt has four scores"
    assert found["metrics"]["pass@4"]["prompts"] == 1 and found["metrics"]["pass@2"]["prompts"] == 2
    assert "maj@1" not in values and 0 < values["maj@2"] < 1
    assert (found["prompts"], found["responses"], found["failed"]) == (2, 8, 1)
    assert evaluate(rows(GROUPS), 1.0, extraction("gsm8k"), seed=1) == found


def test_the_fraction_of_truncated_responses_leaves_out_conversations_that_failed() -> None:
    found = rows(GROUPS)
    for row, finish in zip(found, ["truncated", "failed", "failed", "failed"], strict=False):
        row["finish"] = finish
    assert evaluate(found, 1.0, None, 1)["truncated"] == 1 / 5
    assert evaluate([{**row, "finish": "failed"} for row in found], 1.0, None, 1)["truncated"] == 0


def test_the_lowest_score_of_a_correct_response() -> None:
    graded = [[("a", 0.5), ("b", 0.4)]]
    assert evaluate(rows(graded), 0.5, None, 1)["metrics"]["pass@1"]["value"] == 0.5
    assert evaluate(rows(graded), 0.6, None, 1)["metrics"]["pass@2"]["value"] == 0.0


@pytest.mark.parametrize(
    "reward, response, answer",
    [
        ("gsm8k", "so #### 1,000", "1E+3"),
        ("gsm8k", "1000.0", "1E+3"),
        ("gsm8k", "none", None),
        ("exact", " 4 ", "4"),
        ("exact", " ", None),
    ],
)
def test_answers_of_the_built_in_rewards(reward: str, response: str, answer: str | None) -> None:
    extract = extraction(reward)
    assert extract is not None and extract(response) == answer


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"\boxed{1} then \boxed{\frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("1", None),
        (r"\boxed{}", None),
    ],
)
def test_the_answer_of_mathematics_is_in_the_last_box(response: str, answer: str | None) -> None:
    pytest.importorskip("math_verify")
    extract = extraction("math")
    assert extract is not None and extract(response) == answer


def test_a_function_of_ones_own_has_no_answers() -> None:
    assert extraction("rewards.py:score") is None and extraction("format") is None and extraction(None) is None


def test_data_sets_are_separate_and_tables_compare_them(tmp_path: Path) -> None:
    options = ["model.path=m", "data.files=[x/a.jsonl,b.jsonl]", "reward.function=gsm8k", "trainer.device=cpu"]
    config = compose("eval", [*options, "rollout.n=4"])
    assert isinstance(config, EvalConfig)
    run = RunDir(tmp_path)
    both = [*rows(GROUPS[:1], "x/a.jsonl"), *rows(GROUPS[1:], "b.jsonl")]
    run.responses.write_text("".join(json.dumps(row) + "\n" for row in both))
    found = evaluate_run(config, run)
    text = evaluation_text([(run.name, found)])
    assert json.loads(run.evaluation.read_text()) == found
    assert [data["name"] for data in found["data"]] == ["a", "b"]
    assert [data["metrics"]["pass@1"]["value"] for data in found["data"]] == [0.5, pytest.approx(1 / 3)]
    assert "0.500 [0.500, 0.500]" in text and "95%, percentile bootstrap" in text

    table = evaluation_table([("one", found), ("none", {}), ("two", found)])
    assert table is not None
    assert [row[:3] for row in table.rows] == [
        *(["a", "m", "one"], ["a", "m", "two"]),
        *(["b", "m", "one"], ["b", "m", "two"]),
    ]
    assert table.columns[6:-2] == ["score", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert table.rows[2][table.columns.index("pass@4")] == "–", "the second data set has three scores"
    assert evaluation_table([("none", {})]) is None and evaluation_text([]) == ""


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = compose("eval", ["model.path=m", "data.files=a.jsonl", "reward.function=gsm8k", "trainer.device=cpu"])
    assert isinstance(config, EvalConfig)
    run = RunDir(tmp_path)
    run.responses.write_text("".join(json.dumps(row) + "\n" for row in rows(GROUPS)))
    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(RunError, match=r"eval.json could not be written: No space left .*; free space or raise"):
        evaluate_run(config, run)


def test_several_rewards_are_recorded_with_their_weights(tmp_path: Path) -> None:
    rewards = ["reward.functions=[gsm8k,format]", "reward.weights=[1,0.1]"]
    config = compose("eval", ["model.path=m", "data.files=a.jsonl", "trainer.device=cpu", *rewards])
    assert isinstance(config, EvalConfig)
    run = RunDir(tmp_path)
    run.responses.write_text("".join(json.dumps(row) + "\n" for row in rows(GROUPS)))
    evaluate_run(config, run)
    found = json.loads(run.evaluation.read_text())
    assert (found["reward"], found["weights"]) == ("gsm8k, format", [1, 0.1])
