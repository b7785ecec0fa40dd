from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_rl.liveness import activity
from hpc_rl.liveness.activity import Activity

DEADLINE_S = 600


def said(*events: tuple[float, str, str]) -> list[str]:
    """Return what a program says that began at 10 s and has these events: time, what happens, a text."""
    shown: list[str] = []
    running = Activity(shown.append, 10.0)
    for at, event, text in events:
        match event:
            case "is to":
                running.is_to(text)
            case "begin":
                running.begin(text, at)
            case "end":
                running.end()
            case "print":
                running.printed(at)
            case "look":
                running.check(at)
    return shown


LONG = [(10.5, "is to", "list runs"), (11.9, "look", ""), (12.0, "look", ""), (20.0, "look", "")]
PART = (11.0, "begin", "asking Slurm")


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        (LONG, ["list runs"]),
        (LONG[:2], []),
        ([LONG[0], PART, (12.0, "look", "")], ["asking Slurm"]),  # since the program began
        ([LONG[0], PART, (11.5, "end", ""), (12.0, "look", "")], ["list runs"]),
        ([LONG[0], (11.0, "print", ""), (20.0, "look", "")], []),
        ([LONG[0], (11.0, "print", ""), (19.0, "begin", "a"), (20.9, "look", "")], []),  # since the part began
        ([LONG[0], (11.0, "print", ""), (19.0, "begin", "a"), (21.0, "look", "")], ["a"]),
        ([(19.0, "begin", "a"), (20.0, "print", ""), (21.9, "look", ""), (22.0, "look", "")], ["a"]),
        (
            [*LONG, (21.0, "begin", "a"), (23.0, "look", ""), (23.5, "begin", "b"), (25.5, "look", "")],
            ["list runs", "a", "b"],
        ),
        ([PART, (20.0, "look", ""), (20.0, "end", ""), PART, (30.0, "look", "")], ["asking Slurm"]),  # once
        ([(30.0, "look", "")], []),
    ],
)
def test_a_quiet_program_says_once_what_it_does(events: list[tuple[float, str, str]], shown: list[str]) -> None:
    assert said(*events) == shown


SLOW = """
import contextlib, io, sys, time
from hpc_rl.liveness.activity import doing, hide_activity, shown_activity

@doing("reading a file")
def read():
    time.sleep(0 if "fast" in sys.argv else 3)

with shown_activity(), contextlib.redirect_stderr(io.StringIO()):  # a library prints errors that are not shown
    if "drawn" in sys.argv:
        hide_activity()
    read()
read()
print("done")
"""


@pytest.mark.parametrize(
    ("words", "merged", "out", "errors"),
    [
        ([], False, "done\n", "hpc-rl: reading a file\n"),
        (["quiet"], False, "done\n", ""),
        ([], True, "done\n", None),  # 2>&1: another program may read it
        (["fast"], False, "done\n", ""),
        (["drawn"], False, "done\n", ""),
    ],
)
def test_the_line_is_on_standard_error_alone(words: list[str], merged: bool, out: str, errors: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *words],
        env={**os.environ, "HPC_RL_QUIET": "1" if "quiet" in words else ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert (done.stdout, done.stderr) == (out, errors)


def test_the_start_of_the_program_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert activity._start_of_program() < time.monotonic() - 0.1

    def hidden(_path: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", hidden)
    assert activity._start_of_program() == pytest.approx(time.monotonic(), abs=60)
