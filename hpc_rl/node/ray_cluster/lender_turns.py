"""The lender jobs that a run queues itself (`hpc-rl lend RUN --auto N`), as node 0 looks after them.

Each look is a process of its own with a deadline, because sbatch may be slow or missing. The run does not depend on it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_rl.formats.auto_lending import needs_looks, order_file
from hpc_rl.formats.typed_json import is_number
from hpc_rl.slurm.place import Place
from hpc_rl.system.files import read_json
from hpc_rl.system.processes import start

LOOK_S = 5.0
"""Interval between looks for an order."""
RETRY_S = 60.0
"""Interval between looks after jobs that wait although their order has ended."""
TURN_TIMEOUT_S = 600.0
"""Deadline of a look after the jobs."""
END_S = 12.0
"""Deadline of the last one, and of one that is in progress before it."""
_SITE = "HPC_RL_SITE"


class LenderTurns:
    """Starts the looks of a run after its lender jobs, as long as there is an order, or jobs wait."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._ordered: int | None = None
        """When the order was written that was seen last."""
        self._next_look = self._due = 0.0
        self._has_ended = False
        self._turn: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    def poll(self) -> None:
        """Start a look if one is due. Returns at once; to be called several times a second."""
        now = time.monotonic()
        if self._turn is not None and self._turn.poll() is None:
            if now > self._deadline:
                print(f"hpc-rl: lend --auto: no answer within {TURN_TIMEOUT_S:.0f} s; it is tried again", flush=True)
                self._kill()
            return
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        ordered = self._order_time()
        if ordered == self._ordered and (now < self._due or not needs_looks(self._run_dir)):
            return
        look_s = read_json(order_file(self._run_dir)).get("look_s", RETRY_S)
        self._ordered, self._due = ordered, now + (look_s if is_number(look_s) else RETRY_S)
        self._begin(TURN_TIMEOUT_S)

    def end(self, left_s: float = math.inf) -> None:
        """Cancel the jobs that wait, because the run ends.

        Args:
            left_s: time until Slurm ends the processes of this job.
        """
        limit_s = min(END_S, left_s / 2)
        self._await(limit_s)
        if not self._has_ended and needs_looks(self._run_dir):
            self._has_ended = True
            self._begin(limit_s, "--last")
            self._await(limit_s)

    def _order_time(self) -> int | None:
        try:
            return order_file(self._run_dir).stat().st_mtime_ns
        except OSError:
            return None

    def _begin(self, limit_s: float, *options: str) -> None:
        words = [sys.executable, "-P", "-m", "hpc_rl.submission.auto_lending.turn", str(self._run_dir), *options]
        # What this job is must not reach the jobs that are queued.
        environ = {
            name: value
            for name, value in Place().environment(os.environ).items()
            if not name.startswith("HPC_RL_") or name == _SITE
        }
        self._deadline = time.monotonic() + limit_s
        with contextlib.suppress(OSError), os.fdopen(os.dup(1), "wb") as output:
            self._turn = start(words, environ, output, death=signal.SIGKILL)

    def _await(self, limit_s: float) -> None:
        """Wait for the look that is in progress, and end it if it takes too long."""
        if self._turn is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._turn.wait(limit_s)
            self._kill()

    def _kill(self) -> None:
        assert self._turn is not None
        self._turn.kill()
        self._turn.wait()
        self._turn = None
