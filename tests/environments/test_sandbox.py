"""Programs that try to leave their container, to exhaust the machine, or to outlive their time.

As root, the containers belong to the user nobody; otherwise to this user.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.environments import sandbox
from hpc_rl.environments.bash_tool import Bash
from hpc_rl.environments.loading import load_definition
from hpc_rl.environments.protocol import Episode
from hpc_rl.environments.python_tool import Python, report
from hpc_rl.environments.sandbox import RUNNERS, Limits, Output, ProgramResult, Sandbox, find_runner, tree_usage
from hpc_rl.environments.tool_calls import ToolCall
from hpc_rl.errors import UserError
from hpc_rl.system.processes import descendants
from tests.environments.runners import reachable_path

LIMITS = Limits(time_s=60, cpu_s=60, memory_mb=512, tasks=24, disk_mb=8, output_chars=4000)


@pytest.fixture(scope="module")
def path(apptainer_environ: dict[str, str]) -> Iterator[str]:
    with reachable_path(apptainer_environ) as found:
        yield found


@pytest.fixture(params=list(RUNNERS))
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each runner that is installed, with nothing of it left after the test."""
    name: str = request.param
    if name == "apptainer":
        monkeypatch.setenv("PATH", request.getfixturevalue("path"))
    elif not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


def run(runner: str, code: str, limits: Limits = LIMITS) -> ProgramResult:
    """Run a Python program."""
    return Sandbox(runner, limits=limits).run(["python3", "-I", "-u", "-c", code])


def with_limits(**changes: float) -> Limits:
    return Limits(**{**vars(LIMITS), **changes})  # type: ignore[arg-type]


def processes_with(text: str) -> list[int]:
    """Return the processes of this machine that have a text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def name_of(pid: int) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_the_tools(runner: str) -> None:
    python = load_definition("hpc_rl.environments.python_tool:Python", {"runner": runner, "time_s": 60})
    (message,) = (
        Episode(python, 1000)
        .answer("", [ToolCall("python", {"code": "import sys\nprint(6 * 7, sys.stdin.read())"})])
        .messages
    )
    assert message["content"] == "42 \n"
    tool = Python(runner, time_s=60)
    assert tool.python("x = 1") == "[no output]"
    assert tool.python("print('a'); 1 / 0").endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert tool.python("# " + "x" * 300_000 + "\nprint('long')") == "long\n"
    assert tool.python("# \udc80\nprint(1)") == "1\n"
    shipped = load_definition(None, {}, ["python", "bash"], runner)
    assert list(shipped.tools) == ["python", "bash"]
    (message,) = Episode(shipped, 1000).call(ToolCall("python", {"code": "print(6 * 7)"})).messages
    assert message["content"] == "42\n"
    bash = load_definition("hpc_rl.environments.bash_tool:Bash", {"runner": runner, "time_s": 60})
    (message,) = (
        Episode(bash, 1000)
        .answer("", [ToolCall("bash", {"command": "cd /; echo $((6 * 7)) > /tmp/x; cat /tmp/x; false"})])
        .messages
    )
    assert message["content"] == "42\n[exit code 1]"
    assert Bash(runner, time_s=60).bash("cat; ls /tmp; exit 3") == "[exit code 3]"
    assert Bash(runner, time_s=60).bash("kill -9 $$").startswith("[exit code 137")


def test_files_and_secrets_of_the_user_are_not_there(
    runner: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "my-secret")
    monkeypatch.setenv("APPTAINERENV_TOKEN", "my-secret")
    (tmp_path / "key").write_text("my-secret")
    code = f"""
import os, glob
print(sorted(os.listdir("/")), os.listdir("/tmp"), os.path.exists({str(tmp_path)!r}), os.environ["HOME"])
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try: print(open(path, errors="replace").read().count("my-" + "secret"), end=" ")
    except OSError: pass
print("my-" + "secret" in str(os.environ))
print([pid for pid in os.listdir("/proc") if pid == {str(os.getpid())!r}])
"""
    ran = run(runner, code)
    folders, *counts, _ = ran.output.splitlines()
    assert ran.code == 0, ran
    assert not any(name in folders for name in ("'home'", "'root'", "'work'", "'scratch'", "True"))
    assert folders.endswith("[] False /tmp") and set(counts[0].split()) == {"0", "False"}
    assert ran.output.rstrip().endswith("[]")


def test_nothing_can_be_written_but_a_little_in_tmp(runner: str) -> None:
    code = """
import os
for path in ("/x", "/usr/x", "/bin/x", "/dev/x", "/proc/sys/kernel/printk_ratelimit", "/proc/sys/kernel/core_pattern"):
    try: print("WRITTEN", open(path, "a"))
    except OSError as error: print(type(error).__name__)
"""  # fmt: skip
    assert "WRITTEN" not in run(runner, code).output
    fill = "for name in /tmp/a /var/tmp/b /dev/shm/c; do head -c 30M /dev/zero > $name; done; du -sm /tmp"
    assert int(Sandbox(runner, limits=LIMITS).run(["bash", "-c", fill]).output.split()[-2]) == 8
    many = """
import os
for number in range(10**6):
    os.makedirs(f"/tmp/{number // 1000}", exist_ok=True)
    os.close(os.open(f"/tmp/{number // 1000}/{number}", os.O_CREAT))
"""
    assert "No space left" in run(runner, many).output


def test_there_is_no_network(runner: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for address in (("127.0.0.1", {port}), ("192.0.2.2", 22), ("8.8.8.8", 53)):
    try: print("CONNECTED", socket.create_connection(address, timeout=5))
    except OSError as error: print(error)
print(socket.if_nameindex())
"""
        ran = run(runner, code)
    assert "CONNECTED" not in ran.output and ran.output.count("Errno") == 3
    assert "eth" not in ran.output


def test_no_namespace_and_no_capability_can_be_had(runner: str) -> None:
    ran = Sandbox(runner, limits=LIMITS).run(
        ["sh", "-c", "unshare -Ur true; unshare -m true; grep CapBnd /proc/self/status"]
    )
    assert ran.output.count("unshare failed") == 2 and "0000000000000000" in ran.output


def test_a_fork_bomb(runner: str) -> None:
    bomb = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
    ended_by = ("more than 5 s", "more than 24 processes and threads", "more than 512 MB of memory")
    assert run(runner, bomb, with_limits(time_s=5)).ended_by in ended_by
    threads = """
import threading, time
for _ in range(500): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
time.sleep(600)
"""
    ran = run(runner, threads)
    assert ran.ended_by == "more than 24 processes and threads" or "can't start new thread" in ran.output


def test_memory(runner: str) -> None:
    assert "MemoryError" in run(runner, "x = bytearray(1 << 30)").output
    together = """
import os, time
for _ in range(6):
    if not os.fork():
        x = bytearray(b"x") * (300 << 20)
        time.sleep(600)
time.sleep(600)
"""
    assert run(runner, together).ended_by == "more than 512 MB of memory"


def test_cpu_time_and_wall_clock_time(runner: str) -> None:
    assert run(runner, "while True: pass", with_limits(cpu_s=1)).code in (128 + 9, 128 + 24)
    deaf = """
import signal, time
for number in range(1, 32):
    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
print("on")
time.sleep(600)
"""
    ran = run(runner, deaf, with_limits(time_s=15))
    assert (ran.output, ran.ended_by) == ("on\n", "more than 15 s")


def test_endless_output(runner: str) -> None:
    began = time.monotonic()
    ran = Sandbox(runner, limits=with_limits(time_s=15)).run(["sh", "-c", "echo first; yes"])
    assert ran.ended_by == "more than 15 s" and time.monotonic() - began < 600
    assert ran.output.startswith("first\ny\n") and len(ran.output) < 4100 and "characters are left out" in ran.output


@pytest.mark.parametrize("end", ["pass", "time.sleep(600)"])
def test_a_daemon_ends_with_its_program(runner: str, end: str) -> None:
    mark = f"daemon-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os, time
if not os.fork():
    os.setsid()
    if not os.fork(): os.execvp("python3", ["python3", "-c", "import time; time.sleep(600)", {mark!r}])
    os._exit(0)
time.sleep(1)
{end}
"""
    run(runner, code, with_limits(time_s=15))
    assert not processes_with(mark)


def test_a_program_ends_with_the_process_that_runs_it(runner: str) -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
from hpc_rl.environments.sandbox import Sandbox, Limits
Sandbox({runner!r}, limits=Limits(time_s=600)).run(["python3", "-c", "import time; time.sleep(600)", {mark!r}])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    deadline = time.monotonic() + 600
    while not any(name_of(pid).startswith("python3") for pid in processes_with(mark) if pid != parent.pid):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while processes_with(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_image(runner: str, tmp_path: Path) -> None:
    if os.geteuid() == 0:  # nobody has to reach it
        for folder in [tmp_path, *tmp_path.parents][:-2]:
            folder.chmod(folder.stat().st_mode | 0o055)
    root = tmp_path / "image"
    for name in ("bin", "dev", "proc", "tmp", "var/tmp", "etc"):
        (root / name).mkdir(parents=True)
    for source in {"/bin/sh", *_libraries("/bin/sh")}:
        (root / source[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, root / source[1:])
    ran = Sandbox(runner, str(root), LIMITS).run(["sh", "-c", "echo /bin/* $HOME; : > /bin/x"])
    assert ran.output.startswith("/bin/sh /tmp\n") and "Read-only file system" in ran.output


def _libraries(program: str) -> list[str]:
    found = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
    return [word for word in found if word.startswith("/")]


def test_what_is_refused(runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        Sandbox(runner, "no/such")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"needs a folder|cannot be started here"):
        Sandbox(runner, str(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot be started here"):
        Sandbox(runner, str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no apptainer and no singularity and no bwrap on PATH"):
        find_runner("auto")
    with pytest.raises(UserError, match="choose one of auto, apptainer, bwrap"):
        find_runner("docker")


def test_the_start_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(sandbox, "_run", lambda argv, *_: started.append(argv[0]) or ProgramResult("started\n", 0))
    sandbox._check_start.cache_clear()
    for _ in range(2):
        sandbox._check_start(("here",), 1.0)
    sandbox._check_start(("there",), 1.0)
    sandbox._check_start.cache_clear()
    assert started == ["here", "there"]


def test_reports() -> None:
    assert report(ProgramResult("", 0)) == "[no output]"
    assert report(ProgramResult("a\n", 0)) == "a\n"
    assert report(ProgramResult("a\n", 2)) == "a\n[exit code 2]"
    assert report(ProgramResult("", 137, "more than 5 s")) == "[ended: it used more than 5 s]"


def test_output_keeps_both_ends() -> None:
    output = Output(10)
    for _ in range(1000):
        output.add("é".encode() * 500 + b"\xff")
    text = output.text()
    assert text == "ééééé\n[500,990 characters are left out]\néééé\ufffd"
    split = Output(10)
    for byte in "éü".encode():
        split.add(bytes([byte]))
    assert split.text() == "éü"


def test_usage_of_a_tree() -> None:
    code = "import os, time\nos.fork() or os.fork()\nprint(flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        tasks, size, files = tree_usage(process.pid)
        os.killpg(process.pid, 9)
    assert tasks == 3 and 3 << 20 < size < 300 << 20 and files == 9
    assert tree_usage(2**22 + 1) == (0, 0, 0)
