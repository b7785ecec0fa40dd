"""`--after`: the jobs that are waited for, and what they will have written."""

import json
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.slurm.place import Place
from hpc_rl.submission.series.after import find_after
from tests.fake_slurm import fake_slurm


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (fake_slurm(tmp_path, monkeypatch) / "squeue.text").write_text("5|RUNNING|node1|None|\n6|PENDING||Priority|\n")
    return tmp_path


def run(folder: Path, **job: str) -> None:
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))


@pytest.mark.parametrize(
    ("kind", "results"),
    [
        ("sft", {"model"}),
        ("generate", {"responses.jsonl"}),
        ("eval", {"eval.json", "responses.jsonl"}),
        ("select", {"selected.jsonl"}),
        ("torchrun", {"model"}),
    ],
)
def test_the_result_of_the_run_is_coming(folder: Path, kind: str, results: set[str]) -> None:
    run(folder / "runs" / "first", job_id="5", kind=kind)
    after = find_after("first", Place())
    assert after.job_ids == ("5",)
    assert after.coming == {folder / "runs" / "first" / name for name in results}


def test_the_results_of_all_stages_of_a_pipeline_are_coming(folder: Path) -> None:
    several = folder / "runs" / "loop"
    run(several / "loop_1-a", job_id="5", kind="generate")
    run(several / "loop_1-b", job_id="6", kind="select")
    stages = [{"round": "1", "stage": name} for name in "ab"]
    (several / "pipeline.json").write_text(json.dumps({"stages": stages}))
    after = find_after("loop", Place())
    assert after.job_ids == ("5", "6")
    assert after.coming == {several / "loop_1-a" / "responses.jsonl", several / "loop_1-b" / "selected.jsonl"}


def test_the_advice_after_a_failed_stage_names_the_pipeline(folder: Path) -> None:
    several = folder / "runs" / "loop"
    run(several / "loop_1-a", job_id="4", kind="generate")
    (several / "loop_1-a" / "status.json").write_text(json.dumps({"job_id": "4", "state": "FAILED", "exit_code": 1}))
    (several / "pipeline.json").write_text(json.dumps({"stages": [{"round": "1", "stage": "a"}]}))
    with pytest.raises(UserError, match=r"run loop_1-a is FAILED, .* with hpc-rl requeue loop$"):
        find_after("loop", Place())
