"""python -m hpc_rl.rl.main_ppo with a Ray of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rl.runs.jobs import TIMEOUT_S, series


@pytest.mark.slow
def test_the_command_starts_a_ray_of_its_own_and_ends_it(base: list[str], tmp_path: Path) -> None:
    """The cluster requires a token that only its owner can read."""
    unset = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "HPC_RL_RUN_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "hpc_rl.rl.main_ppo", "--run-dir", str(tmp_path), *base, "trainer.export=true"]
    done = subprocess.run(
        command,
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "= 2 mini-batches of 8, x 2 epochs = 4 updates" in done.stdout and "Traceback" not in done.stderr
    assert len(series(tmp_path, "actor/pg_loss")) == 2
    assert (tmp_path / "model" / "config.json").exists()
    attempt = tmp_path / "attempt-1"
    assert (attempt / "config.yaml").read_text() == (tmp_path / "config.yaml").read_text()
    modes = {path.name: path.stat().st_mode & 0o777 for path in attempt.iterdir() if path.suffix != ".yaml"}
    assert [modes.pop(name) for name in list(modes) if name.startswith(".group-")] == [0o700]
    scratch = attempt / ".node0.scratch"
    assert modes.pop(scratch.name) and not Path(scratch.read_text()).exists()
    assert modes == {
        "driver.log": 0o600,
        "node0-global_pool-rank0.log": 0o600,
        "ray.token": 0o600,
    }
    assert attempt.stat().st_mode & 0o777 == 0o700
    token = (attempt / "ray.token").read_text()
    assert len(token) == 64 and token not in done.stdout + done.stderr
