"""Ctrl-C while a command waits for a job: the command ends at once, and the job goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import process_start_time
from tests.fake_slurm import calls, fake_slurm

DEADLINE_S = 600


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose job is a process on this machine, with a log of one line."""
    run = RunDir(tmp_path / "runs" / "first")
    run.path.mkdir(parents=True)
    with subprocess.Popen(["sleep", str(DEADLINE_S)]) as job:
        facts = {"job_id": "local-7", "host": os.uname().nodename, "pid": job.pid}
        run.job.write_text(json.dumps({**facts, "start_time": process_start_time(job.pid)}))
        run.write_status("local-7", 1, "RUNNING", None)
        (run.path / "job-local-7.log").write_text("the first line\n")
        yield run
        assert job.poll() is None, "the job went on"
        job.kill()


@pytest.mark.parametrize("words", [["logs", "--follow", "first"], ["logs", "--follow", "--node", "0", "first"]])
def test_following_ends_and_the_job_goes_on(run: RunDir, words: list[str]) -> None:
    log = run.path / "attempt-1" / "node0-rank0.log"
    log.parent.mkdir()
    log.write_text("the first line\n")
    with subprocess.Popen(
        [sys.executable, "-m", "hpc_rl.cli", *words], cwd=run.path.parents[1],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as following:  # fmt: skip
        assert following.stdout
        assert any("the first line" in line for line in following.stdout)
        following.send_signal(signal.SIGINT)
        _, said = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 130
    *stages, last = said.splitlines()
    assert last == "hpc-rl: job local-7 continues; end it with hpc-rl stop first or hpc-rl cancel first"
    assert all(re.fullmatch(r"hpc-rl: running, \d+:\d\d", stage) for stage in stages), said


@pytest.mark.parametrize("questions", [1, 3], ids=["while it asks for the expected start", "while it waits"])
def test_submitting_with_wait_ends_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, questions: int
) -> None:
    (fake_slurm(tmp_path, monkeypatch) / "squeue.text").write_text("7 |RUNNING |node1 |None |N/A |\n")
    (tmp_path / "train.py").touch()
    words = ["submit", "torchrun", "--job-name", "first", "--wait", "trainer.device=cpu", "--", "train.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "hpc_rl.cli", *words], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as waiting:  # fmt: skip
        deadline = time.monotonic() + DEADLINE_S
        while sum(call.startswith("squeue") for call in calls(tmp_path)) < questions:
            assert waiting.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == 130
    *stages, last = said.splitlines()
    assert last == "hpc-rl: job 7 continues; end it with hpc-rl stop first or hpc-rl cancel first"
    assert questions == 1 or stages[-1].startswith("hpc-rl: starting: the job script prepares the nodes, "), said
    assert not any(call.startswith("scancel") for call in calls(tmp_path))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["status", "first", "--json"],
            ["still at work: show the state and progress of a run", "waiting for Slurm (squeue)"],
        ),
        (["runs", "--json"], ["still at work: list runs with state", "waiting for Slurm (squeue)"]),
    ],
)
def test_a_command_that_takes_long_says_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], shown: list[str]
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue").write_text("#!/bin/sh\nsleep 3\necho '7 |RUNNING |node1 |None |N/A |'\n")
    run = RunDir(tmp_path / "runs" / "first")
    run.path.mkdir(parents=True)
    run.config.touch()
    run.job.write_text(json.dumps({"job_id": "7"}))
    monkeypatch.delenv("HPC_RL_QUIET")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_rl.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert "RUNNING" in json.dumps(json.loads(done.stdout))
    lines = done.stderr.splitlines()
    assert lines and all(any(line.startswith(f"hpc-rl: {text}") for text in shown) for line in lines), done.stderr


def test_a_terminal_shows_the_stage_and_a_clock_before_the_first_step(run: RunDir) -> None:
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "hpc_rl.cli", "logs", "-f", "first"], cwd=run.path.parents[1],
        stdin=subprocess.DEVNULL, stdout=its, stderr=its,
    ) as following:  # fmt: skip
        os.close(its)
        text, deadline = "", time.monotonic() + DEADLINE_S
        while len(set(re.findall(r"starting: the job script prepares the nodes, (\d+:\d\d)", text))) < 2:
            assert time.monotonic() < deadline, text
            text += os.read(ours, 2**16).decode(errors="replace")
        following.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(ours, 2**16):
                pass
    os.close(ours)
    assert following.returncode == 130
