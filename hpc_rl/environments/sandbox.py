"""Programs that a model wrote, in a container without network, without the user's files, and with limits.

Everything works for a user without privileges, in user namespaces (user_namespaces(7)), because the nodes of a cluster
offer nothing else. The programs that create the container are rows of RUNNERS.

- There is no network but an empty loopback, and no process outside is visible. When the first process of the container
  ends, the kernel ends all others.
- The root file system is an image, or the system folders of the host; both are read-only. /tmp, /var/tmp and /dev/shm
  are one file system in memory of a limited size. Nothing outlives a run.
- The environment is empty but for PATH, HOME and LANG. There are no capabilities, and no further user namespaces, in
  which a program could mount file systems without a limit.
- A container of root belongs to the user nobody: root owns the files below /proc/sys, and could therefore change the
  settings of the kernel without any capability.
- Each process has limits (getrlimit(2)) of CPU time, address space, file size and open files. The sums of memory and
  tasks of all processes are measured while they run, because limits for groups of processes (cgroups) are rarely
  delegated to users. The kernel's own limit of tasks per user is set as well, if it counts for each user namespace.
- Calls of the kernel for what no namespace separates, or for memory that no process has mapped, fail: keys, anonymous
  files, System V objects and others; see kernel_filter. What pipes and sockets hold is limited by their number.
- The sums are measured 20 times a second. Until then, processes together may exceed them: only a limit of the Slurm
  job on its memory is exact.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import platform
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.environments import kernel_filter
from hpc_rl.environments.protocol import cut
from hpc_rl.errors import UserError
from hpc_rl.system.processes import shell_code

_MB = 1 << 20
_PAUSE_S = 0.05
"""Between two measurements of a container."""
_END_TIMEOUT_S = 30.0
_OWN_TASKS, _OWN_BYTES, _OWN_FILES = 32, 96 * _MB, 256
"""What the runner itself takes in a container."""
_LOCKED_BYTES = 64 << 10
"""Memory that a process may lock. The limit counts all processes of the user."""
_NOBODY = 65534
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr")
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    time_s: float = 30.0
    """Wall-clock time, from the start of the container. Ends a program that waits; `cpu_s` ends one that computes."""
    cpu_s: int = 10
    """CPU time of each process."""
    memory_mb: int = 1024
    """Address space of each process, and resident memory of all processes together."""
    tasks: int = 64
    """Processes and threads."""
    disk_mb: int = 64
    """Files in /tmp."""
    open_files: int = 128
    """Open files of each process."""
    all_files: int = 512
    """Open files of all processes together: the kernel has memory for pipes and sockets that no process has mapped."""
    output_chars: int = 10_000
    """Characters of the output that are kept."""


@dataclass(frozen=True)
class ProgramResult:
    """The end of a program."""

    output: str
    """Standard output and standard error, without its middle if it is long."""
    code: int
    """Exit code as a shell shows it."""
    ended_by: str | None = None
    """The limit for which it was ended, with its value; None if it ended on its own."""


@dataclass(frozen=True)
class Runner:
    """A program that creates containers."""

    programs: tuple[str, ...]
    """Names of the program; the first one on PATH is used."""
    command: Callable[[str, Path | None], list[str]]
    """(path of the program, image or None for the host's system folders) -> the words before a command. They are called
    after _SETUP, and bind the folders that it makes in /sys."""
    takes_files: bool
    """Whether an image may be a file."""


_NEEDS = ("unshare", "setpriv", "prlimit", "mount")
"""Programs of util-linux that every runner needs."""
_NAMESPACES = (
    *("unshare", "--user", "--map-root-user"),
    # The signal at the death of the parent, which the kernel forgets when a process enters a user namespace.
    *("setpriv", "--pdeathsig=KILL"),
    *("unshare", "--net", "--pid", "--ipc", "--uts", "--mount", "--mount-proc", "--fork", "--kill-child"),
)
# /sys of the new mount namespace holds what the container gets: tmp, dev and an empty root. $1 is the size of tmp.
_SETUP = r"""
set -eu
echo 1 > /proc/sys/user/max_user_namespaces # one for the runner, and none for the program
mount -t tmpfs -o "size=$1,nr_inodes=20000,nosuid,nodev,mode=755" sandbox /sys
shift
cd /sys
mkdir tmp dev config root
for folder in /dev /proc /tmp /var/tmp /etc SYSTEM_FOLDERS; do mkdir -p "root$folder"; done
mount -t tmpfs -o size=64k,nosuid,mode=755 devices dev
for name in null zero full random urandom; do
  : > "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mkdir dev/shm
mount --bind tmp dev/shm
mount -o remount,bind,ro dev
export APPTAINER_CONFIGDIR=/sys/config SINGULARITY_CONFIGDIR=/sys/config
code=0
setpriv --no-new-privs "$@" || code=$?
exit "$code" # no exec: this shell is the first process, and the runner would forget to end with its parent
""".replace("SYSTEM_FOLDERS", " ".join(_SYSTEM_FOLDERS))
_LIMIT = (
    'export HOME=/tmp; ulimit -v "$1"; [ -z "$2" ] || ulimit -u "$2" 2>/dev/null || ulimit -p "$2"; shift 2; exec "$@"'
)
"""Sets the limits that the runner itself would not fit in, and the home folder, which apptainer does not let us set."""


def _apptainer(program: str, image: Path | None) -> list[str]:
    """Return a call of apptainer-exec(1). Its own option for a network namespace needs root."""
    isolate = ["--userns", "--containall", "--cleanenv", "--no-home", "--no-privs", "--no-eval", "--no-umask"]
    mounts = ["--no-mount", "tmp,home,cwd,hostfs,bind-paths,sys,dev,devpts"]
    binds = ["/sys/tmp:/tmp", "/sys/tmp:/var/tmp", "/sys/dev:/dev"]
    if image is None:
        binds += [f"{folder}:{folder}:ro" for folder in _SYSTEM_FOLDERS if Path(folder).exists()]
    words = [program, "--silent", "exec", *isolate, *mounts, "--env", "LANG=C.UTF-8", "--pwd", "/tmp"]
    return [*words, *(word for bind in binds for word in ("--bind", bind)), str(image or "/sys/root")]


def _bwrap(program: str, image: Path | None) -> list[str]:
    """Return a call of bwrap(1)."""
    root = ["--ro-bind", str(image or "/sys/root"), "/"]
    if image is None:
        root += [word for folder in _SYSTEM_FOLDERS if Path(folder).exists() for word in ("--ro-bind", folder, folder)]
    folders = ["--proc", "/proc", "--dev-bind", "/sys/dev", "/dev", "--bind", "/sys/tmp", "/tmp"]
    environ = ["--clearenv", "--setenv", "PATH", _PATH, "--setenv", "LANG", "C.UTF-8"]
    isolate = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    return [program, *isolate, *root, *folders, "--bind", "/sys/tmp", "/var/tmp", *environ, "--chdir", "/tmp"]


RUNNERS: dict[str, Runner] = {
    "apptainer": Runner(("apptainer", "singularity"), _apptainer, takes_files=True),
    "bwrap": Runner(("bwrap",), _bwrap, takes_files=False),
}
"""Name -> how it is called, in the order in which `auto` looks for them."""


class Sandbox:
    """Runs programs, each in a new container.

    Args:
        runner: a name in RUNNERS, or "auto" for the first one that is installed.
        image: root file system as a folder, or for apptainer a SIF file. None for the system folders of the host.

    Raises:
        UserError: no runner is installed, there is no such image, or a container cannot be started here.
    """

    def __init__(self, runner: str = "auto", image: str | None = None, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        name, program = find_runner(runner)
        self._start = _start_words(name, program, image, self._limits)
        _check_start(tuple(self._start), self._limits.time_s)

    def run(self, argv: Sequence[str], stdin: str = "") -> ProgramResult:
        """Run a program to its end, or until it exceeds a limit."""
        return _run([*self._start, *argv], stdin, self._limits)


def find_runner(name: str) -> tuple[str, str]:
    """Return the name of a runner and the path of its program.

    Raises:
        UserError: there is no such runner, or it is not installed.
    """
    if name != "auto" and name not in RUNNERS:
        raise UserError(f"sandbox runner {name}: choose one of auto, {', '.join(RUNNERS)}")
    for candidate in RUNNERS if name == "auto" else [name]:
        row = RUNNERS[candidate]
        program = next((found for each in row.programs if (found := shutil.which(each))), None)
        if program and all(map(shutil.which, _NEEDS)):
            return candidate, program
    wanted = [program for each in (RUNNERS if name == "auto" else [name]) for program in RUNNERS[each].programs]
    raise UserError(
        f"no {' and no '.join(wanted)} on PATH, in which the model's programs would run (with "
        f"{', '.join(_NEEDS)} of util-linux): load its module, or use tools that run no programs"
    )


def _start_words(name: str, program: str, image: str | None, limits: Limits) -> list[str]:
    path = None if image is None else Path(image).expanduser().absolute()
    if path is not None and not path.exists():
        raise UserError(f"sandbox image {image}: no such file or folder")
    if path is not None and not RUNNERS[name].takes_files and not path.is_dir():
        raise UserError(f"sandbox image {image} is a file, but {name} needs a folder: unpack it, or use apptainer")
    each = ["prlimit", f"--cpu={limits.cpu_s}", f"--fsize={limits.disk_mb * _MB}", f"--nofile={limits.open_files}"]
    each += [f"--sigpending={limits.tasks + _OWN_TASKS}", "--msgqueue=0", f"--memlock={_LOCKED_BYTES}"]
    tasks = str(limits.tasks + _OWN_TASKS) if _counts_tasks_per_namespace() else ""
    inside = ["/bin/sh", "-c", _LIMIT, "sh", str(limits.memory_mb * 1024), tasks]
    if os.geteuid() == 0:
        each = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", *each]
    outside = [*_NAMESPACES, "sh", "-c", _SETUP, "sh", f"{limits.disk_mb}m"]
    return [*each, "--core=0", *outside, *RUNNERS[name].command(program, path), *inside]


def _counts_tasks_per_namespace() -> bool:
    """Return whether RLIMIT_NPROC counts the tasks of a user namespace (Linux 5.14), instead of all of the user's."""
    version = platform.release().split(".")
    return (int(version[0]), int(version[1].partition("-")[0])) >= (5, 14)


@functools.cache
def _check_start(start: tuple[str, ...], time_s: float) -> None:
    found = _run([*start, "/bin/sh", "-c", "echo started"], "", Limits(time_s=max(time_s, _END_TIMEOUT_S)))
    if found.output.strip() != "started":
        problem = " ".join(found.output.split())[-500:] or f"exit code {found.code}"
        raise UserError(
            f"a container for the model's programs cannot be started here: {problem}. It needs user namespaces "
            "(user.max_user_namespaces of sysctl) and an image with /bin/sh. If this is root, the user nobody must be "
            "able to read runner and image"
        )


def _run(argv: Sequence[str], stdin: str, limits: Limits) -> ProgramResult:
    with tempfile.TemporaryFile() as source:
        source.write(stdin.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            argv,
            env={"PATH": os.environ.get("PATH", _PATH)},
            cwd="/",
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=kernel_filter.prepare(),
        )
    output = Output(limits.output_chars)
    ended_by = None
    try:
        ended_by = _watch(process, output, limits)
    finally:
        assert process.stdout is not None
        process.stdout.close()  # first, because a process that writes to a full pipe does not end
        _end(process)
    return ProgramResult(output.text(), shell_code(process.returncode), ended_by)


def _watch(process: subprocess.Popen[bytes], output: Output, limits: Limits) -> str | None:
    """Read the output until the container ends. Return the limit that it exceeds, or None."""
    assert process.stdout is not None
    descriptor, now = process.stdout.fileno(), time.monotonic()
    deadline, measured = now + limits.time_s, now
    while now < deadline:
        # Nobody else writes to the pipe after the first process has ended.
        if select.select([descriptor], [], [], min(_PAUSE_S, deadline - now))[0]:
            if not (data := os.read(descriptor, 1 << 16)):
                return None
            output.add(data)
        elif process.poll() is not None:
            return None
        now = time.monotonic()
        if now - measured >= _PAUSE_S:
            tasks, size, files = tree_usage(process.pid)
            if files > limits.all_files + _OWN_FILES:
                return f"more than {limits.all_files} open files"
            if tasks > limits.tasks + _OWN_TASKS:
                return f"more than {limits.tasks} processes and threads"
            if size > limits.memory_mb * _MB + _OWN_BYTES:
                return f"more than {limits.memory_mb} MB of memory"
            measured = time.monotonic()
    return f"more than {limits.time_s:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the container, and wait until none of its processes is left.

    The child of the runner is the first process of the container. The runner ends when the kernel has ended all others.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PAUSE_S)
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tree_usage(root: int) -> tuple[int, int, int]:
    """Return the number of tasks, the resident memory in bytes, and the open files of a process and all below it."""
    tasks = size = files = 0
    left = [root]
    while left:
        pid = left.pop()
        left += _children(pid)
        with contextlib.suppress(OSError):
            # Fields 20 and 24 of proc_pid_stat(5); the third one follows the name in parentheses.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            tasks, size = tasks + int(fields[17]), size + int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            files += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return tasks, size, files


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may end at any time
        for path in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (path / "children").read_text().split())
    return found


class Output:
    """The beginning and the end of what a program writes."""

    def __init__(self, most_chars: int) -> None:
        self._most_chars, self._text = most_chars, ""
        self._left_out = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, data: bytes) -> None:
        """Add what was read."""
        self._text += self._decoder.decode(data)
        if len(self._text) > 4 * self._most_chars + (1 << 16):
            kept = self._text[: self._most_chars] + self._text[-self._most_chars :]
            self._left_out, self._text = self._left_out + len(self._text) - len(kept), kept

    def text(self) -> str:
        """Return the text, without its middle if it is long."""
        return cut(self._text, self._most_chars, self._left_out)
