from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.config.compose import dump
from hpc_rl.rl import cluster
from hpc_rl.run_dir import RunDir
from tests.rl.ppo_config import ppo_config


def test_workers_get_defaults_and_what_the_user_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TOKENIZERS_PARALLELISM", "VLLM_LOGGING_LEVEL", "MALLOC_TRIM_THRESHOLD_")
    for name in (*names, "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    on_gpus = cluster.worker_environment(ppo_config("trainer.device=cuda"))
    assert on_gpus == {
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_LOGGING_LEVEL": "WARN",
    }
    on_cpus = cluster.worker_environment(ppo_config())
    assert on_cpus == {
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_LOGGING_LEVEL": "WARN",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
    }


def test_each_start_is_an_attempt_with_the_files_of_a_job(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path / "run"), ppo_config()
    first = cluster.new_attempt(run, config)
    run.stop.touch()
    second = cluster.new_attempt(run, ppo_config("rollout.n=3"))
    assert [first.name, second.name] == ["attempt-1", "attempt-2"]
    assert not run.stop.exists()
    assert run.config.read_text() == dump(ppo_config("rollout.n=3")) != dump(config)
    assert first.stat().st_mode & 0o777 == second.stat().st_mode & 0o777 == 0o700


def test_runs_of_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stamps = iter(["ppo-1", "ppo-1", "ppo-2"])
    monkeypatch.setattr(cluster.time, "strftime", lambda _: next(stamps))
    first, second = cluster.new_run(), cluster.new_run()
    assert (first.path, second.path) == (tmp_path / "runs" / "ppo-1", tmp_path / "runs" / "ppo-2")
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().out == "run directory: runs/ppo-1\nrun directory: runs/ppo-2\n"
