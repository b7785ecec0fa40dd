"""Which eval.json is an evaluation: that of `hpc-rl eval`, and no file of another program with this name."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.evaluations import data_names, evaluation_text, model_names, read_evaluation, result_metrics
from hpc_rl.tracking.recorded import read_run

METRICS = {"score": {"value": 0.5, "low": 0.4, "high": 0.6, "prompts": 3}}
DATA = {"name": "test", "file": "data/test.jsonl", "prompts": 3, "truncated": 0.0, "failed": 0, "metrics": METRICS}
EVALUATION = {"model": "/runs/sft-1/model", "n": 8, "temperature": 1.0, "interval": "95%", "data": [DATA]}


def run(folder: Path, found: Any, kind: str | None) -> RunDir:
    (folder / "eval.json").write_text(json.dumps(found))
    if kind is not None:
        (folder / "job.json").write_text(json.dumps({"kind": kind}))
    return RunDir(folder)


@pytest.mark.parametrize("kind", ["eval", None])
def test_an_evaluation_is_read(tmp_path: Path, kind: str | None) -> None:
    assert read_evaluation(run(tmp_path, EVALUATION, kind)) == EVALUATION


@pytest.mark.parametrize("kind", ["torchrun", "sft"])
def test_a_file_of_another_kind_is_not(tmp_path: Path, kind: str) -> None:
    assert read_evaluation(run(tmp_path, EVALUATION, kind)) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "gsm8k"},
        {"data": 1},
        {"data": [{**DATA, "file": 7}]},
        {"model": 7},
        {"data": [{**DATA, "metrics": [1]}]},
        {"data": [{**DATA, "metrics": {"score": 0.5}}]},
        {"data": [{"accuracy": 0.5}]},
        {"temperature": "high"},
    ],
)
def test_a_file_of_another_shape_is_not(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_run(run(tmp_path, {**EVALUATION, **changes}, None)).evaluation == {}


def test_a_table_names_the_model_and_the_data() -> None:
    """Not only the runs, which are eval-1 and eval-2. The same file by another path is the same data."""
    other = {**EVALUATION, "model": "/runs/ppo-1/model", "data": [{**DATA, "file": "/home/me/data/test.jsonl"}]}
    harder = {**EVALUATION, "data": [{**DATA, "file": "hard/test.jsonl"}]}
    lines = evaluation_text([("eval-1", EVALUATION), ("eval-2", harder), ("eval-3", other)]).splitlines()
    assert lines[0].split()[:4] == ["Data", "Model", "Run", "Prompts"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["data/test", "sft-1", "eval-1"],
        ["data/test", "ppo-1", "eval-3"],
        ["hard/test", "sft-1", "eval-2"],
    ]


def test_short_names_differ_if_the_files_or_models_do() -> None:
    assert data_names(["a/test.jsonl", "b/test.jsonl"]) == {"a/test.jsonl": "a/test", "b/test.jsonl": "b/test"}
    assert list(data_names(["test.jsonl", "test.parquet"]).values()) == ["test.jsonl", "test.parquet"]
    assert list(data_names(["org/data-v1.4", "org/data-v1.5"]).values()) == ["data-v1.4", "data-v1.5"]
    assert list(model_names(["/x/runs/sft-1/model", "/y/runs/sft-1/model"]).values()) == [
        "x/runs/sft-1",
        "y/runs/sft-1",
    ]
    assert list(model_names(["Qwen/Qwen2.5-0.5B", "/m/step-8"]).values()) == ["Qwen2.5-0.5B", "step-8"]


def test_the_result_of_several_data_sets_is_the_mean_of_their_scores() -> None:
    worse = {**DATA, "name": "hard", "metrics": {**METRICS, "score": {"value": 0.1}, "pass@1": {"value": 0.2}}}
    assert result_metrics(EVALUATION) == {"eval/score": 0.5, "eval/test/score": 0.5}
    assert result_metrics({**EVALUATION, "data": [DATA, worse]}) == {
        "eval/score": pytest.approx(0.3),
        "eval/test/score": 0.5,
        "eval/hard/score": 0.1,
        "eval/hard/pass@1": 0.2,
    }
