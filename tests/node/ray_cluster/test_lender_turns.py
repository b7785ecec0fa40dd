"""When node 0 of a run looks after the lender jobs that the run queues itself."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from hpc_rl.formats.auto_lending import AutoLending, order_file, write_auto_lending
from hpc_rl.node.ray_cluster import lender_turns
from hpc_rl.node.ray_cluster.lender_turns import LenderTurns

LOOK = """#!/bin/sh
env > "{folder}/environment"
echo "$4 $5" >> "{folder}/looks"
[ ! -e "{folder}/hangs" ] || exec sleep 600
"""


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LenderTurns:
    python = tmp_path / "python"
    python.write_text(LOOK.format(folder=tmp_path))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(lender_turns, "LOOK_S", 0.0)
    monkeypatch.setattr(lender_turns, "RETRY_S", 0.0)
    return LenderTurns(tmp_path)


def looks(folder: Path) -> list[str]:
    path = folder / "looks"
    return path.read_text().split() if path.exists() else []


def order(folder: Path, look_s: float) -> None:
    order_file(folder).write_text(json.dumps({"look_s": look_s}))


def poll_until(turns: LenderTurns, folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(looks(folder)) < count:
        assert time.monotonic() < deadline, looks(folder)
        turns.poll()
        time.sleep(0.01)


def test_without_an_order_nothing_is_started(turns: LenderTurns, tmp_path: Path) -> None:
    for _ in range(3):
        turns.poll()
    turns.end()
    assert looks(tmp_path) == []


def test_looks_repeat_while_there_is_an_order(
    turns: LenderTurns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CPU_BIND", "HPC_RL_ATTEMPT_DIR", "HPC_RL_SITE"):
        monkeypatch.setenv(name, "mine")
    order(tmp_path, 0.05)
    poll_until(turns, tmp_path, 3)
    environ = (tmp_path / "environment").read_text()
    assert "HPC_RL_SITE=mine" in environ and not {"SLURM_JOB", "SLURM_CPU", "HPC_RL_A"} & {
        line[:9] for line in environ.splitlines()
    }
    order(tmp_path, 600)
    os.utime(order_file(tmp_path), ns=(1, 1))
    poll_until(turns, tmp_path, 4)  # another order counts at once
    order_file(tmp_path).unlink()
    poll_until(turns, tmp_path, 5)  # the jobs that wait are cancelled
    for _ in range(3):
        turns.poll()
    turns.end()
    assert looks(tmp_path)[4:] == [str(tmp_path)]


def test_at_the_end_there_is_one_more_look(turns: LenderTurns, tmp_path: Path) -> None:
    order(tmp_path, 600)
    poll_until(turns, tmp_path, 1)
    turns.end()
    turns.end()
    assert looks(tmp_path) == [str(tmp_path), str(tmp_path), "--last"]


def test_jobs_that_wait_without_an_order_are_looked_after(turns: LenderTurns, tmp_path: Path) -> None:
    write_auto_lending(tmp_path, AutoLending(waiting=1))  # left over from an earlier attempt
    poll_until(turns, tmp_path, 2)  # and again, until Slurm has answered
    turns.end()
    assert looks(tmp_path)[-1] == "--last"
    write_auto_lending(tmp_path, AutoLending())
    before = looks(tmp_path)
    for _ in range(3):
        turns.poll()
    LenderTurns(tmp_path).end()
    assert looks(tmp_path) == before


def test_a_look_has_a_deadline(
    turns: LenderTurns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs").touch()
    monkeypatch.setattr(lender_turns, "TURN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lender_turns, "END_S", 0.2)
    order(tmp_path, 0.0)
    poll_until(turns, tmp_path, 2)
    turns.end()
    assert "it is tried again" in capsys.readouterr().out


def test_the_last_look_has_the_time_that_slurm_leaves(
    turns: LenderTurns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender_turns, "END_S", 60)
    (tmp_path / "hangs").touch()
    order(tmp_path, 0.0)
    poll_until(turns, tmp_path, 1)
    began = time.monotonic()
    turns.end(0.2)
    assert time.monotonic() - began < 60
