"""Which eval.json is an evaluation: that of `hpc-rl eval`, and no file of another program with this name."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.evaluations import read_evaluation
from hpc_rl.tracking.recorded import read_run

METRICS = {"score": {"value": 0.5, "low": 0.4, "high": 0.6, "prompts": 3}}
DATA = {"name": "test", "prompts": 3, "truncated": 0.0, "failed": 0, "metrics": METRICS}
EVALUATION = {"n": 8, "temperature": 1.0, "interval": "95%", "data": [DATA]}


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
        {"data": [{**DATA, "name": 7}]},
        {"data": [{**DATA, "metrics": [1]}]},
        {"data": [{**DATA, "metrics": {"score": 0.5}}]},
        {"data": [{"accuracy": 0.5}]},
        {"temperature": "high"},
    ],
)
def test_a_file_of_another_shape_is_not(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_run(run(tmp_path, {**EVALUATION, **changes}, None)).evaluation == {}
