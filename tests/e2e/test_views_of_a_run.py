"""`hpc-rl watch` and `hpc-rl report` on a run on this machine, as a user sees them."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import make_tiny_model, write_chats
from tests.sandbox.processes import DEADLINE_S

HPC_RL = [sys.executable, "-m", "hpc_rl.cli"]


def hpc_rl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*HPC_RL, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


class Terminal:
    """A command on its own terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.text = ""
        self._own, theirs = pty.openpty()
        environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            [*HPC_RL, *arguments], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environ
        )
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs

    def until(self, shown: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(shown, self.text):
            assert self._read() or time.monotonic() < deadline, f"{shown} does not come: {self.text}"

    def press(self, key: str) -> None:
        os.write(self._own, key.encode())

    def exit_code(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            self._read()
            assert time.monotonic() < deadline, self.text
        while self._read():
            continue
        assert termios.tcgetattr(self.theirs) == self.before  # the user's terminal is restored
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self.theirs)

    def _read(self) -> bool:
        if not select.select([self._own], [], [], 0.1)[0]:
            return False
        self.text += os.read(self._own, 65536).decode(errors="replace")
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("views")
    make_tiny_model(made / "model")
    write_chats(made / "train.jsonl", 64)
    return made


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run on two nodes that continues until it is asked to stop."""
    options = ["model.path=model", "data.train_files=train.jsonl", "trainer.device=cpu", "data.train_batch_size=4"]
    options += ["trainer.total_training_steps=1000000", "trainer.total_epochs=1000000", "trainer.export=false"]
    command = [*HPC_RL, "submit", "sft", "--local", "--nodes", "2", "--job-name", "r", *options]
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    yield process
    process.terminate()
    process.wait(DEADLINE_S)


@pytest.mark.slow
def test_watch_until_the_end_and_the_report_of_it(folder: Path, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "runs" / "r" / "metrics.jsonl").exists():
        assert running.poll() is None and time.monotonic() < deadline, (folder / "out.txt").read_text()
        time.sleep(0.1)
    terminal = Terminal(folder, "watch", "r")
    try:
        terminal.until(r"RUNNING")
        terminal.until(r"loss.*[▁▂▃▄▅▆▇█]")
        terminal.until(r"1: \S+ ")  # the second node
        terminal.press("q")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
    assert running.poll() is None
    terminal = Terminal(folder, "watch", "r")
    try:
        terminal.until(r"RUNNING")
        assert hpc_rl(folder, "stop", "r").returncode == 0
        assert terminal.exit_code() == 75 and "STOPPED" in terminal.text
    finally:
        terminal.close()
    once = hpc_rl(folder, "watch", "r", "--once")
    assert once.returncode == 0 and "STOPPED" in once.stdout and "\x1b" not in once.stdout
    assert "0: " in once.stdout and "report: " in once.stdout

    page = (folder / "runs" / "r" / "report.html").read_text()  # the trainer's own
    assert "STOPPED (exit code 75)" in page and "Memory per node" in page
    assert hpc_rl(folder, "report", "r", "r", "--out", "both.html").stdout == "both.html\n"
    assert "The configurations are the same." in (folder / "both.html").read_text()


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "runs" / "new").mkdir(parents=True)
    (tmp_path / "runs" / "new" / "config.yaml").write_text("a: 1\n")
    for arguments, said in (
        (["watch", "new"], "watch needs a terminal: use hpc-rl watch new --once"),
        (["watch", "gone", "--once"], "no run 'gone'"),
        (["report", "new"], "run new has nothing to report yet"),
        (["report", "new", "--out", "no/such/folder.html"], "in a folder that does not exist"),
        (["report", "new", "--out", "."], f"--out {tmp_path} is a folder"),
        (["report", "gone"], "no run 'gone'"),
    ):
        done = hpc_rl(tmp_path, *arguments)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    once = hpc_rl(tmp_path, "watch", "new", "--once")
    assert once.returncode == 0 and "NOT SUBMITTED" in once.stdout and "no step completed" in once.stdout
