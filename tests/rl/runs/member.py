"""An actor for tests of calls; a file of its own, since an actor's process imports what its class's file imports."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors.process import log_to


class Member:
    """Two of them compute together, and one notices when the other is gone."""

    def pid(self) -> int:
        return os.getpid()

    def give(self, value: int) -> int:
        return value

    def refuse(self, run_error: bool) -> None:
        raise RunError("out of it") if run_error else UserError("give less")

    def break_down(self) -> None:
        raise ValueError("a bug")

    def log_to(self, path: Path) -> None:
        log_to(path)

    def leave(self) -> None:
        sys.exit(4)

    def crash(self) -> None:
        ctypes.string_at(0)

    def work(self) -> None:
        time.sleep(3600)

    def work_with(self, pid: int) -> None:
        while os.path.exists(f"/proc/{pid}"):  # noqa: PTH110
            time.sleep(0.01)
        raise ValueError("connection closed by peer")
