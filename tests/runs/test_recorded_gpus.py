"""The memory of GPUs as earlier runs recorded it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.recorded_gpus import gpus_like


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, age: int, slurm: str, *sizes: float, attempt: int = 1, job: Any = None) -> None:
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
    return None if like is None else (like.run.name, like.gigabytes)


def test_the_newest_run_in_the_same_partition_with_the_same_type_and_features() -> None:
    a100 = SlurmConfig(partition="gpu", gpu_type="a100")
    assert found(a100) is None
    made("old", 30, "{partition: gpu, gpu_type: a100}", 42.9)
    assert found(a100) == ("old", 42.9)
    made("like", 20, "{partition: gpu, gpu_type: a100}", 85.9, 85.6)
    made("other-partition", 10, "{partition: big, gpu_type: a100}", 141.0)
    made("other-type", 9, "{partition: gpu, gpu_type: h100}", 80.0)
    made("other-feature", 8, "{partition: gpu, gpu_type: a100, constraint: small}", 40.0)
    made("on-cpus", 7, "{partition: gpu, gpu_type: a100}")
    made("here", 6, "{partition: gpu, gpu_type: a100}", 16.0, job={"pid": 7})
    assert found(a100) == ("like", 85.6)
    assert found(SlurmConfig(partition="gpu")) is None
    assert found(SlurmConfig(partition="big", gpu_type="a100")) == ("other-partition", 141.0)
    assert found(SlurmConfig(partition="gpu", gpu_type="a100", constraint="small")) == ("other-feature", 40.0)


def test_settings_that_name_nothing_fit_any_cluster() -> None:
    made("elsewhere", 1, "{}", 80.0)
    assert found(SlurmConfig()) is None


def test_the_newest_attempt_that_recorded_gpus() -> None:
    made("a", 1, "{gpu_type: a100}", 40.0)
    made_again = Path("runs/a")
    (made_again / "attempt-2").mkdir()
    assert found(SlurmConfig(gpu_type="a100")) == ("a", 40.0)
    made("a", 1, "{gpu_type: a100}", 80.0, attempt=3)
    assert found(SlurmConfig(gpu_type="a100")) == ("a", 80.0)
