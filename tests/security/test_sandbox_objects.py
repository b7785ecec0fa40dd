"""Programs in an ordinary user's sandbox that reach for what no namespace separates: keys, memory, quotas."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.environments.sandbox import RUNNERS
from tests.environments.runners import reachable_path
from tests.security.users import VICTIM, as_ordinary, run

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user needs root"),
]
OUTSIDE = """
import ctypes, os, sys
from hpc_rl.environments.sandbox import Limits, Sandbox
libc = ctypes.CDLL(None, use_errno=True)
column = int(os.uname().machine == "aarch64")
add, keyctl = (248, 217)[column], (250, 219)[column]
ring = libc.syscall(keyctl, 1, None)
key = libc.syscall(add, b"user", b"mine", b"precious", 8, -3)
libc.syscall(keyctl, 5, key, 0x3F3F0000)
libc.syscall(add, b"user", b"mine", b"precious", 8, -4)
limits = Limits(time_s=120, cpu_s=60, memory_mb=256, tasks=24)
ran = Sandbox(RUNNER, limits=limits).run(["python3", "-I", "-u", "-c", CODE.replace("KEY", str(key))])
print(ran.output, ran.ended_by)
value = ctypes.create_string_buffer(32)
print("outside:", libc.syscall(keyctl, 11, key, value, 32), value.value.decode(), len(os.listdir("/dev/shm")))
"""
"""A parent with a key in its session keyring, another one in the user's, and a program in the sandbox."""
CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
column = int(os.uname().machine == "aarch64")
def call(name, numbers, *arguments):
    number = numbers[column]
    if number is not None:
        done = libc.syscall(number, *arguments)
        print(name, errno.errorcode[ctypes.get_errno()] if done < 0 else "WORKED")
buffer = ctypes.create_string_buffer(64)
call("read key", (250, 219), 11, KEY, buffer, 64)
call("change key", (250, 219), 2, KEY, b"stolen", 6)
call("read session", (250, 219), 11, -3, buffer, 64)
call("search user's", (250, 219), 10, -4, b"user", b"mine", 0)
call("add", (248, 217), b"user", b"x", b"y", 1, -4)
call("request", (249, 218), b"user", b"mine", None, -4)
call("segment", (29, 194), 0, 1 << 20, 0o1600)
call("queue", (68, 186), 0, 0o1600)
call("semaphores", (64, 190), 0, 1000, 0o1600)
call("memfd", (319, 279), b"x", 0)
call("secret memory", (447, 447), 0)
call("io_uring", (425, 425), 8, ctypes.create_string_buffer(120))
call("inotify", (294, 26), 0)
call("fanotify", (300, 262), 0, 0)
call("mq", (240, 180), b"x", 0o102, 0o600, None)
call("bpf", (321, 280), 0, buffer, 64)
call("perf", (298, 241), buffer, 0, -1, -1, 0)
call("userfault", (323, 282), 1)
import fcntl
ends = os.pipe()
try: print("pipe size", fcntl.fcntl(ends[0], 1031, 1 << 20), "WORKED")
except OSError as error: print("pipe size", errno.errorcode[error.errno])
"""
MANY_PIPES = """
import os, time
for _ in range(20):
    if not os.fork():
        for _ in range(50): os.write(os.pipe()[1], b"x" * 65536)
        time.sleep(600)
time.sleep(600)
"""
TIMERS = """
import signal, os
os.kill(os.getpid(), 0)
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
made = 0
while made < 10000 and libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0: made += 1
print("timers", made < 200)
"""


@pytest.fixture(scope="module")
def path(apptainer_environ: dict[str, str]) -> Iterator[str]:
    with reachable_path(apptainer_environ) as found:
        yield found


@pytest.fixture(params=list(RUNNERS))
def runner(request: pytest.FixtureRequest, path: str) -> str:
    if not any(shutil.which(program, path=path) for program in RUNNERS[request.param].programs):
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def outside(runner: str, path: str, code: str) -> str:
    """Run a program in the sandbox as an ordinary user, and return what it and its parent print."""
    text = OUTSIDE.replace("RUNNER", repr(runner)).replace("CODE", f"({code!r})")
    with tempfile.TemporaryDirectory(prefix="hpc-rl-objects-", dir="/var/tmp") as home:
        os.chown(home, VICTIM, VICTIM)
        done = run(VICTIM, as_ordinary(VICTIM, sys.executable, "-P", "-c", text), Path(home), deadline_s=600, PATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keys_and_uncounted_memory_are_out_of_reach(runner: str, path: str) -> None:
    found = outside(runner, path, CALLS)
    assert "WORKED" not in found and found.count("ENOSYS") == 19, found
    assert "outside: 8 precious" in found


def test_open_files_are_counted_over_all_processes(runner: str, path: str) -> None:
    assert "more than 512 open files" in outside(runner, path, MANY_PIPES)


def test_timers_of_the_user_are_left(runner: str, path: str) -> None:
    assert "timers True" in outside(runner, path, TIMERS)
