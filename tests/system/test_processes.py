import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.system.processes import (
    deferred_interrupts,
    deferred_termination,
    descendants,
    end,
    python_with,
    shell_code,
    start,
)

WAIT = "import signal, sys, time; print('ready', flush=True); time.sleep(600)"
IGNORE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"
FORWARD = f"""
import os, subprocess, sys
from hpc_rl.system.processes import forward_termination, shell_code, wait
child = subprocess.Popen([sys.executable, "-c", {IGNORE!r}], stdout=subprocess.PIPE)
child.stdout.readline()
forward_termination(child, 0.5)
print("ready", flush=True)
sys.exit(shell_code(wait(child)))
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_codes_are_those_of_a_shell(returncode: int, code: int) -> None:
    assert shell_code(returncode) == code


def test_descendants_begin_with_the_children() -> None:
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}])"
    child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE)
    try:
        assert child.stdout and child.stdout.readline() == b"ready\n"
        grandchild = list(descendants(child.pid))
        assert len(grandchild) == 1
        found = list(descendants(os.getpid()))
        assert found.index(child.pid) < found.index(grandchild[0])
    finally:
        for pid in descendants(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]


def test_some_descendants_stay() -> None:
    code = """
import os, subprocess
from hpc_rl.system.processes import descendants, end_descendants
kept, other = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
end_descendants(kept=[kept.pid])
print(list(descendants(os.getpid())) == [kept.pid])
kept.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys; from hpc_rl.system.processes import start\n"
        f"child = start([sys.executable, '-c', {WAIT!r}], os.environ, open(sys.argv[1], 'wb'))\n"
        "print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "ready\n")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_alive(pid))


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = start([sys.executable, "-c", IGNORE], os.environ, log)
    until(lambda: (tmp_path / "log").read_text() == "ready\n")
    end(child, grace_s=0.2)
    assert child.returncode == -signal.SIGKILL


def test_termination_is_forwarded_and_becomes_a_kill() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FORWARD], stdout=subprocess.PIPE)
    assert parent.stdout and parent.stdout.readline() == b"ready\n"
    parent.send_signal(signal.SIGINT)
    assert parent.wait(600) == 137
    parent.stdout.close()


def test_interrupts_are_deferred() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupts() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_python_with_a_package() -> None:
    assert python_with("json", "other") == sys.executable
    assert python_with("no_such_package", "other") == "other"
    assert python_with("no_such_package", None) is None


def test_termination_is_held_for_this_process_only(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with deferred_termination(), (tmp_path / "out").open("wb") as out:
            signal.raise_signal(signal.SIGTERM)
            assert not received
            start(["grep", "SigBlk", "/proc/self/status"], os.environ, out).wait(600)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert int((tmp_path / "out").read_text().split()[1], 16) == 0
