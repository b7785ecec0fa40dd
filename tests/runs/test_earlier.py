"""What earlier runs recorded: their speed, and the memory of their GPUs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.earlier import RunSpeed, gpus_like, newest_like
from hpc_rl.runs.folders import remember
from hpc_rl.tracking.planned import Expected

PLAN = Expected("update", 40, 76, 40, [], gpu="h100", gpus=4, parameters=7_000_000_000, items=64, step_s=[1, 2])


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose runs are those of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def made(root: Path, name: str, age: int, plan: Expected = PLAN, kind: str = "sft", **more: Any) -> RunDir:
    """Make a run of three steps, the first of which is slow; `age` in seconds."""
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    run.job.write_text(json.dumps({"kind": kind, "plan": asdict(plan)}))
    os.utime(run.job, (1_000_000 - age, 1_000_000 - age))
    speeds = [10.0, 8000.0, 8200.0, 7800.0]
    records = [
        {
            "step": step,
            "perf/tokens_per_s": speed,
            "perf/time_per_step": 32000 / speed,
            "perf/max_memory_gb": 38.0 + step / 10,
            **more,
        }
        for step, speed in enumerate(speeds, start=1)
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_medians_without_the_first_step(project: Path) -> None:
    made(project, "a", 10)
    found = newest_like("sft", "h100", 7_000_000_000)
    assert found is not None
    assert (found.run, found.throughput, found.planned_gb) == ("a", 2000.0, 40.0)
    assert (found.tokens, found.peak_gb) == pytest.approx((500.0, 38.4))


def test_the_newest_run_that_is_like_it(project: Path) -> None:
    made(project, "old", 30)
    made(project, "like", 20, replace(PLAN, parameters=7_700_000_000))
    made(project, "larger", 10, replace(PLAN, parameters=7_800_000_000))
    made(project, "elsewhere", 9, replace(PLAN, gpu="a100"))
    made(project, "other", 8, kind="dpo")
    made(project, "older-version", 7, replace(PLAN, items=0))
    made(project, "no-gpus", 6, replace(PLAN, gpus=0))
    (project / "no-job").mkdir()
    just_begun = made(project, "just-begun", 1)
    just_begun.metrics.write_text(just_begun.metrics.read_text().splitlines()[0] + "\n")
    found = newest_like("sft", "h100", 7_000_000_000)
    assert found is not None
    assert found.run == "like"
    assert newest_like("sft", "h200", 7_000_000_000) is None


def test_runs_of_other_projects_count(project: Path, tmp_path: Path) -> None:
    assert newest_like("sft", "h100", 7_000_000_000) is None
    made(tmp_path / "other" / "runs", "there", 10)
    assert newest_like("sft", "h100", 7_000_000_000) is None
    remember(tmp_path / "other" / "runs")
    found = newest_like("sft", "h100", 7_000_000_000)
    assert found is not None
    assert found.run == "there"
    made(project, "here", 5)
    found = newest_like("sft", "h100", 7_000_000_000)
    assert found is not None
    assert found.run == "here"


def test_blocks_of_generation_have_different_sizes(project: Path) -> None:
    made(project, "a", 1, **{"perf/responses_per_s": 20.0})
    found = newest_like("sft", "h100", 7_000_000_000)
    assert found is not None
    assert found.tokens == 400.0


def test_steps_before_the_last_submission_do_not_count(project: Path) -> None:
    run = made(project, "a", 1)
    facts, lines = json.loads(run.job.read_text()), run.metrics.read_text().splitlines()
    later = [{**json.loads(line), "time": 1500.0} for line in lines]
    first = [{**record, "perf/tokens_per_s": 99_000.0, "time": 500.0} for record in later]
    both = [*first, *({**record, "step": record["step"] + len(first)} for record in later)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in both))

    def throughput(submitted: str) -> float:
        run.job.write_text(json.dumps({**facts, "submitted": submitted}))
        found = newest_like("sft", "h100", 7_000_000_000)
        assert found is not None
        return found.throughput

    assert throughput("1970-01-01T00:16:40+0000") == 2000.0
    assert throughput("1970-01-01T01:00:00+0100") == throughput("some day") == 2050.0


def test_the_time_of_a_step() -> None:
    measured = RunSpeed("a", throughput=2000.0, tokens=500.0, peak_gb=1.0, planned_gb=1.0)
    assert measured.step_seconds(items=64, longest=1024, gpus=8) == 2.0
    assert measured.step_seconds(items=64, longest=250, gpus=8) == 1.0


def with_gpus(name: str, age: int, slurm: str, *sizes: float, attempt: int = 1, job: Any = None) -> None:
    """Make a run on a node whose GPUs have these sizes; `age` in seconds."""
    run = RunDir(Path("runs") / name)
    folder = run.path / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    run.config.write_text(f"slurm: {slurm}\n")
    lines = [
        {"time": 1.0, "node": "gpu01", "cpus": 4, "memory_gb": 64.0},
        {"time": 2.0, "cpus": 1.0, "memory_gb": 4.0, **({"gpus": [[0.5, 1.0, size] for size in sizes]})},
    ]
    (folder / "node0-usage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.job.write_text(json.dumps(job or {}))
    os.utime(run.job, (1_000_000 - age, 1_000_000 - age))


def found(slurm: SlurmConfig) -> tuple[str, float] | None:
    """Return the name of the run and the size of its GPUs."""
    like = gpus_like(slurm)
    return None if like is None else (like.run.name if like.run else "", like.bytes / 1e9)


def test_the_newest_run_in_the_same_partition_with_the_same_type_and_features() -> None:
    a100 = SlurmConfig(partition="gpu", gpu_type="a100")
    assert found(a100) is None
    with_gpus("old", 30, "{partition: gpu, gpu_type: a100}", 42.9)
    assert found(a100) == ("old", 42.9)
    with_gpus("like", 20, "{partition: gpu, gpu_type: a100}", 85.9, 85.6)
    with_gpus("other-partition", 10, "{partition: big, gpu_type: a100}", 141.0)
    with_gpus("other-type", 9, "{partition: gpu, gpu_type: h100}", 80.0)
    with_gpus("other-feature", 8, "{partition: gpu, gpu_type: a100, constraint: small}", 40.0)
    with_gpus("on-cpus", 7, "{partition: gpu, gpu_type: a100}")
    with_gpus("here", 6, "{partition: gpu, gpu_type: a100}", 16.0, job={"pid": 7})
    assert found(a100) == ("like", 85.6)
    assert found(SlurmConfig(partition="gpu")) is None
    assert found(SlurmConfig(partition="big", gpu_type="a100")) == ("other-partition", 141.0)
    assert found(SlurmConfig(partition="gpu", gpu_type="a100", constraint="small")) == ("other-feature", 40.0)


def test_settings_that_name_nothing_fit_any_cluster() -> None:
    with_gpus("elsewhere", 1, "{}", 80.0)
    assert found(SlurmConfig()) is None


def test_the_newest_attempt_that_recorded_gpus() -> None:
    with_gpus("a", 1, "{gpu_type: a100}", 40.0)
    made_again = Path("runs/a")
    (made_again / "attempt-2").mkdir()
    assert found(SlurmConfig(gpu_type="a100")) == ("a", 40.0)
    with_gpus("a", 1, "{gpu_type: a100}", 80.0, attempt=3)
    assert found(SlurmConfig(gpu_type="a100")) == ("a", 80.0)
