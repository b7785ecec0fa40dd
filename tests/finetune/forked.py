"""Processes of training that begin with their imports done: these take longer than the run of a tiny model.

They are forked from a server (multiprocessing's fork server) that has imported what they need and does nothing else.
Otherwise they are as a launcher starts them: their own environment, arguments and output. The tests in tests/e2e start
them from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Variables that the imports read, so that all processes have the same."""
_PRELOADED = "tests.finetune.preloaded"


class Forked:
    """A process that runs `python COMMAND...`, with stdout and stderr in files.

    Args:
        command: `-m MODULE ARGUMENTS...` or `FILE ARGUMENTS...`.
        environ: its whole environment.
        folder: of the two files.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self._files = (folder / "stdout", folder / "stderr")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOADED])
        self._process = context.Process(target=_run, args=(list(command), {**environ}, self._files))
        self._process.start()

    def wait(self, timeout_s: float) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr.

        Raises:
            TimeoutError: it runs longer than this.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"the process runs for {timeout_s:g} s; its stderr:\n{self._files[1].read_text()}")
        out, errors = (path.read_text() for path in self._files)
        return self._process.exitcode, out, errors

    def kill(self) -> None:
        """End the process, if it runs, and wait for it."""
        self._process.kill()
        self._process.join()


def _run(command: list[str], environ: dict[str, str], files: tuple[Path, Path]) -> None:
    for number, path in enumerate(files, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
