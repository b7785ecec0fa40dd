"""The stacks of a job's processes on one node, in one file of the attempt's folder for each process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_rl.liveness import stacks
from hpc_rl.node.hangs.process_status import BLOCKED, STOPPED

FOLDER = "stacks"
ANSWER_S = 10.0
"""How long processes may take to write their stacks."""
PY_SPY_S = 10.0
COMMAND_S = 2.0
"""How long the kernel may take to give the command line of a process."""
_POLL_S = 0.1
_MAIN_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_DISTRIBUTED = re.compile(r'File "[^"\n]*/(?:torch|vllm)/distributed/(?!checkpoint/)')
"""Code that waits for other processes. Reading and writing checkpoints waits for a file system as well."""
_AUTOGRAD = re.compile(r'File "[^"\n]*/torch/autograd/graph\.py"')


def collect(
    answers: Path, target: Path, node_rank: int, names: Mapping[int, str], states: Mapping[int, str]
) -> dict[int, bool]:
    """Write the stacks of processes, and return which of them wait for other ranks.

    Args:
        answers: folder in which the processes write their stacks.
        target: the attempt's folder.
        names: by process id, of the processes that record beats.
        states: states in proc(5) of all processes of the job on this node.
    """
    asked = [pid for pid in names if states.get(pid) not in STOPPED and stacks.asked(pid)]
    found = await_answers(answers, asked)
    stopped = [pid for pid, state in states.items() if state in STOPPED]
    folder = target / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    pids = sorted({*names, *stopped})
    with ThreadPoolExecutor(max_workers=len(pids) or 1) as pool:
        for pid, from_outside in zip(pids, pool.map(py_spy, pids), strict=True):
            name, state = names.get(pid) or name_of(pid), states.get(pid, "")
            parts = [facts(pid, name, state), found.get(pid, _no_answer(state)), from_outside]
            file = folder / f"node{node_rank}-{slug(name)}-{pid}.txt"
            file.write_text("\n".join(part for part in parts if part), errors="replace")
    return {pid: waits_for_others(text) for pid, text in found.items()}


def await_answers(answers: Path, asked: Sequence[int]) -> dict[int, str]:
    """Return what the processes have written, after all have finished or ANSWER_S seconds have passed."""
    deadline = time.monotonic() + ANSWER_S
    files = {pid: answers / f"{pid}{stacks.SUFFIX}" for pid in asked}
    while time.monotonic() < deadline and not all(stacks.END in _read(path) for path in files.values()):
        time.sleep(_POLL_S)
    found = {pid: _read(path).decode(errors="replace") for pid, path in files.items()}
    return {pid: text for pid, text in found.items() if text}


def waits_for_others(text: str) -> bool:
    """Return whether stacks of faulthandler show that the main thread, which is the last one, is in a collective.

    On a GPU, collectives return at once. The thread then waits at the next line that reads a value of the GPU, which
    can be any line.
    """
    *others, main = [block for block in _MAIN_THREAD.split(text) if block.strip()] or [""]
    if _DISTRIBUTED.search(main):
        return True
    # The threads of the backward pass call FSDP's hooks.
    return bool(_AUTOGRAD.search(main)) and any(_DISTRIBUTED.search(block) for block in others)


def facts(pid: int, name: str, state: str) -> str:
    """Return what the kernel tells about a process, which needs no answer from it."""
    waits_in = _text(Path(f"/proc/{pid}/wchan"))
    return f"{name}, process {pid}, state {state or '?'}, kernel function {waits_in or '?'}\n{command(pid)}\n"


def command(pid: int) -> str:
    """Return the command line of a process; an empty text if the kernel does not give it within COMMAND_S.

    The kernel reads it from the memory of the process. That can wait for a thread of the process that waits for a file
    system which hangs.
    """
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(_text(Path(f"/proc/{pid}/cmdline"))), daemon=True)
    reader.start()
    reader.join(COMMAND_S)
    return "".join(found).replace("\0", " ").strip()


def name_of(pid: int) -> str:
    """Return a name for a process without beats: its Python module, or else the name of its program."""
    words = command(pid).split()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return _text(Path(f"/proc/{pid}/comm")).strip() or f"process {pid}"


def py_spy(pid: int) -> str:
    """Return the stacks that py-spy reads from outside, if it is installed and permitted."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        return ""
    dump = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(dump, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}\n"
    return f"py-spy:\n{done.stdout or done.stderr}"


def slug(name: str) -> str:
    """Return a name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def _no_answer(state: str) -> str:
    if state in STOPPED:
        return "no stacks: the process is stopped\n"
    if state == BLOCKED:
        return "no stacks: the process is blocked in the kernel\n"
    return "no stacks: the process did not answer\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _text(path: Path) -> str:
    return _read(path).decode(errors="replace")
