"""The command line, without starting Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl import run_dir
from hpc_rl.config.compose import dump
from hpc_rl.errors import EXIT_BAD_INPUT, UserError
from hpc_rl.rl.actors import cluster
from hpc_rl.rl.main_ppo import main, parse, run_ppo
from hpc_rl.run_dir import RunDir
from tests.rl.ppo_config import REQUIRED, ppo_config


def test_overrides_and_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, run = parse([*REQUIRED, "--run-dir", "here", "rollout.n=3"])
    assert config.rollout.n == 3
    assert run is not None and run.path == tmp_path / "here"
    assert parse(REQUIRED)[1] is None


def test_a_resolved_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(ppo_config("algorithm.advantage=grpo")))
    assert parse(["--config", str(file)])[0] == ppo_config("algorithm.advantage=grpo")
    with pytest.raises(
        UserError, match=r"--config .*config\.yaml is a complete configuration, so rollout\.n=3 cannot be added"
    ):
        parse(["--config", str(file), "rollout.n=3"])


def test_a_run_without_a_job_holds_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "by-hand")
    config = ppo_config()
    seen: list[str] = []

    def drive(_config: object, _runner: object, run: RunDir, logs: Path) -> int:
        assert logs == run.path / "attempt-1" and run.config.is_file()
        seen.append(run.holder() or "nobody")
        with pytest.raises(UserError, match=r"job local-\d+ is running in .*: wait for it, or choose another"):
            run_ppo(config, run=run)
        return 0

    monkeypatch.delenv("HPC_RL_ATTEMPT_DIR", raising=False)
    monkeypatch.setattr(cluster, "run_driver", drive)
    monkeypatch.setattr(run_dir, "LOCK_TIMEOUT_S", 0.0)
    assert run_ppo(config, run=run) == 0
    assert seen == [f"local-{os.getpid()}"] and run.holder() is None and len(run.attempts()) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rollout.n=3"], "model.path, data.train_files, reward.function: required, but not given"),
        ([*REQUIRED, "rollout.m=3"], "rollout.m: unknown key; did you mean rollout.n?"),
        ([*REQUIRED, "algorithm.advantage=grpo"], "but rollout.n is 1: set rollout.n to 2 or more"),
        (["--config", "/nowhere/config.yaml"], "no configuration at /nowhere/config.yaml"),
    ],
)
def test_bad_input_is_a_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_BAD_INPUT
    out, errors = capsys.readouterr()
    assert not out
    assert all(line.startswith("hpc-rl: ") for line in errors.splitlines()) and message in errors
