"""What a node entry does when Slurm signals it: the run saves before the entry ends.

Slurm sends SIGTERM to the tasks of a job step when the job is preempted, queued again or cancelled, and when its
walltime ends. `scancel --signal=USR2 JOB` sends SIGUSR2. The first signal writes the stop file, and the trainers save
and exit with code 75. The entry ends its processes only if that takes too long, or at a second signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.node.rank_ends import read_exits
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.run_dir import PREEMPTION, REQUEUE, RunDir, read_outcome, terminated_file

SAVING_S = 18.0
"""How long a run may save if Slurm ends the whole job: it kills everything KillWait later, which is 30 s unless the
site has changed it. The rest is for the clean-up."""
ONE_S = 2.0
"""Signals within this time are one. Slurm sends SIGTERM twice, within milliseconds, when it ends a job."""
ASKED_GRACE_S = 5.0
"""How long its processes may then take to end. With the reports of the other nodes, 2 s are left of KillWait."""
_POLL_S = 0.1
_IN_STEP = "SLURM_STEP_ID"
_REASONS = {signal.SIGTERM: PREEMPTION, signal.SIGUSR2: REQUEUE}


class ReceivedSignal(NamedTuple):
    """A signal that has come."""

    number: int
    time: float
    """Seconds of the monotonic clock."""


def handle_signals(rendezvous: Rendezvous) -> threading.Event:
    """From now on, let the run save when Slurm signals this process.

    Returns:
        an event that is set when this process has to end: at a second signal or SIGINT, SAVING_S after the first signal
        if the whole job was signalled, and at the first one if a part of the job has failed or Slurm did not start it.
    """
    asked_to_end = threading.Event()
    received: list[ReceivedSignal] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        # A handler may interrupt any function, so it does no more than this.
        signal.signal(number, lambda number, _frame: received.append(ReceivedSignal(number, time.monotonic())))
    threading.Thread(target=_handle, args=(received, rendezvous, asked_to_end), daemon=True).start()
    return asked_to_end


def end_when(asked_to_end: threading.Event, child: subprocess.Popen[bytes], grace_s: float = ASKED_GRACE_S) -> None:
    """End the child when the event is set: with SIGTERM, and with SIGKILL after `grace_s`. Returns immediately."""

    def wait() -> None:
        asked_to_end.wait()
        child.terminate()
        time.sleep(grace_s)
        child.kill()

    threading.Thread(target=wait, daemon=True).start()


def ask_to_save(run: RunDir, reason: str) -> None:
    """Write the stop file, unless there is one, or the disk is full."""
    with contextlib.suppress(OSError), run.stop.open("x") as stop:
        stop.write(f"{reason}\n")


def has_to_end(received: Sequence[ReceivedSignal], since_s: float, rendezvous: Rendezvous) -> bool:
    """Return whether a node entry has to end.

    Args:
        received: signals so far, at least one.
        since_s: seconds since the first of them.
    """
    is_second = any(one.time - received[0].time > ONE_S for one in received)
    if is_second or any(one.number == signal.SIGINT for one in received) or _IN_STEP not in os.environ:
        return True
    # srun terminates all tasks after the first failure.
    return has_failed(rendezvous) or (since_s >= SAVING_S and terminated_file(rendezvous.attempt_dir).exists())


def time_left(attempt_dir: Path) -> float:
    """Return the seconds in which a job that Slurm ends has to end by itself: what is left of KillWait is for the job
    script. Infinite if Slurm does not end the job."""
    try:
        ended = terminated_file(attempt_dir).stat().st_mtime
    except OSError:
        return math.inf
    return max(0.0, ended + SAVING_S + ASKED_GRACE_S - time.time())


def has_failed(rendezvous: Rendezvous) -> bool:
    """Return whether the job has ended, or a part of it has failed on any node. A part that has saved has not."""
    if read_outcome(rendezvous.attempt_dir) is not None:  # srun terminates the tasks that are slower to leave
        return True
    codes = {*rendezvous.failures().values(), *(ended.exit_code for ended in read_exits(rendezvous.attempt_dir))}
    return not codes <= {0, EXIT_STOPPED}


def _handle(received: list[ReceivedSignal], rendezvous: Rendezvous, asked_to_end: threading.Event) -> None:
    while not received:
        time.sleep(_POLL_S)
    began = time.monotonic()
    if not has_to_end(received, 0, rendezvous):
        ask_to_save(RunDir(rendezvous.attempt_dir.parent), _REASONS[signal.Signals(received[0].number)])
    while not has_to_end(received, time.monotonic() - began, rendezvous):
        time.sleep(_POLL_S)
    asked_to_end.set()
