"""Commands of hpc-rl for a test: each line of the input is a call, each line of the output what it did.

The libraries are imported once, and each command runs in a copy of this process: in a test, thousands of commands run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from typing import IO, Any

import typer.main

import hpc_rl.cli
import hpc_rl.doctor.diagnosis
import hpc_rl.runs.cleaning
import hpc_rl.runs.finding
import hpc_rl.runs.live
import hpc_rl.runs.reporting
import hpc_rl.runs.table
import hpc_rl.submission.requeue
import hpc_rl.tracking.wandb_sync

MEMORY_BYTES = 8 * 2**30
"""Address space of a command: no file is read whole, however large it is."""


def main() -> None:
    built = typer.main.get_command(hpc_rl.cli.app)  # half a second, which would be most of the time of all commands
    typer.main.get_command = lambda _app: built
    for line in sys.stdin:
        print(json.dumps(served(json.loads(line))), flush=True)


def served(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as messages:
        child = os.fork()
        if child == 0:
            run(request["words"], request["folder"], out, messages)
        timer = threading.Timer(request["deadline_s"], os.kill, (child, signal.SIGKILL))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        texts = [_text(file) for file in (out, messages)]
        code = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        return {"code": code, "out": texts[0], "messages": texts[1]}


def run(words: Sequence[str], folder: str, out: IO[bytes], messages: IO[bytes]) -> None:
    """Run the command in this process, and end it."""
    code: object = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(messages.fileno(), 2)
        sys.argv = ["hpc-rl", *words]
        hpc_rl.cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - this is where Python prints it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _text(file: IO[bytes]) -> str:
    """Return the two ends of a text: a log of the size of the limit is shown whole."""
    file.seek(0)
    head = file.read(2**20)
    file.seek(max(2**20, file.seek(0, os.SEEK_END) - 2**20))
    return (head + file.read()).decode(errors="replace")


if __name__ == "__main__":
    main()
