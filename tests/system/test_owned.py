from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hpc_rl.system import owned
from tests.system.test_processes import is_alive, until

DEADLINE_S = 600
LEAVES_CHILD = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "ends" not in sys.argv:
    time.sleep(100000)
sys.exit(7)
"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        owned.command([sys.executable, "-c", LEAVES_CHILD, *words]), stdout=subprocess.PIPE, text=True
    )


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def wait_for_end(pids: list[int]) -> None:
    until(lambda: not any(map(is_alive, pids)))


def test_the_exit_code_is_that_of_the_program_and_nothing_is_left() -> None:
    with start("ends") as process:
        pids = pids_of(process)
        assert len(pids) == 2 and process.wait(DEADLINE_S) == 7
    wait_for_end(pids)


@pytest.mark.parametrize("word", ["polite", "stubborn"])
def test_a_request_to_end_ends_everything(word: str) -> None:
    with start(word) as process:
        pids = pids_of(process)
        assert len(pids) == 2
        process.terminate()
        assert process.wait(DEADLINE_S) in (128 + 15, 128 + 9)
    wait_for_end(pids)


def test_everything_ends_with_the_parent() -> None:
    program = (
        "import sys, subprocess\n"
        "from hpc_rl.system import owned\n"
        f"subprocess.Popen(owned.command([sys.executable, '-c', {LEAVES_CHILD!r}])).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        pids = pids_of(process)
        assert len(pids) == 2
        process.kill()
    wait_for_end(pids)


def test_a_program_is_killed_with_the_process_between() -> None:
    with start("stubborn") as process:
        program, child = pids_of(process)
        process.kill()
    wait_for_end([program])
    os.kill(child, signal.SIGKILL)  # nobody is left that could have ended it


def test_a_program_that_does_not_exist_is_named() -> None:
    command = owned.command(["/no/such/program"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (127, "/no/such/program cannot be started: No such file or directory\n")


def test_a_parent_that_has_ended_already_ends_it() -> None:
    with subprocess.Popen(["true"]) as parent:
        parent.wait(DEADLINE_S)
    command = owned.command(["echo", "started"])
    command[4] = str(parent.pid)
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (128 + 15, "")
