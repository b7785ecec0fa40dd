"""Wait for the job of a run, stop it, or cancel it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.finding import named_paths
from hpc_rl.runs.folders import ROOT
from hpc_rl.runs.status import CANCELLED, RunStatus, in_slurm, place_of, process_alive, status_of, statuses_of
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import by_place
from hpc_rl.system.files import write_atomically
from hpc_rl.system.ownership import is_own_folder

STATE_POLL_S = (1.0, 15.0)
"""First and last interval between two queries to Slurm. The interval grows because many users share its controller."""
SETTLED_S = 60.0
"""How long a job that has queued itself again has to look ended before it counts as ended."""


class EndDetector:
    """Tells, from one look at a run after another, whether its job has ended.

    A job that queues itself again, or that has lost a node, can look as if it had ended before Slurm has queued it.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def seen(self, now: RunStatus, at: float) -> bool:
        """Return whether the job has ended.

        Args:
            at: time of this look, in seconds of a monotonic clock.
        """
        if not now.may_return:
            self._since = None
            return not now.active
        if self._since is None:
            self._since = at
        return at - self._since >= SETTLED_S


def wait(
    run: RunDir,
    on_poll: Callable[[], None] = lambda: None,
    on_status: Callable[[RunStatus], None] = lambda _now: None,
) -> int:
    """Wait until the run's job has ended and return its exit code. `on_poll` is called several times a second, and
    `on_status` whenever Slurm was asked.

    A job that is queued again has not ended; see `EndDetector`.
    """
    interval, most = STATE_POLL_S
    next_look, seen, ending = 0.0, None, EndDetector()
    while True:
        on_poll()
        written = run.status.stat().st_mtime_ns if run.status.exists() else None
        if written != seen:  # the job has just written its state, and Slurm will report it soon
            interval, next_look, seen = STATE_POLL_S[0], 0.0, written
        if time.monotonic() >= next_look:
            now = status_of(run, commands.TIMEOUT_S)
            on_status(now)
            if ending.seen(now, time.monotonic()):
                on_poll()
                return exit_code(now)
            interval, next_look = min(interval * 1.3, most), time.monotonic() + interval
        time.sleep(0.2)


def settled_status(run: RunDir) -> RunStatus:
    """Return the run's status. A job that has queued itself again within SETTLED_S gets the rest of it to look so."""
    (interval, most), deadline = STATE_POLL_S, time.monotonic() + SETTLED_S
    while (now := status_of(run, commands.TIMEOUT_S)).may_return and time.monotonic() < deadline:
        if time.time() - run.status.stat().st_mtime > SETTLED_S:
            break
        time.sleep(interval)
        interval = min(interval * 1.3, most)
    return now


def settled_statuses(several: Sequence[RunDir]) -> list[RunStatus]:
    """Return the statuses of some runs, as `settled_status` does."""
    found = statuses_of(several)
    return [settled_status(run) if now.may_return else now for run, now in zip(several, found, strict=True)]


def exit_code(ended: RunStatus) -> int:
    """Return the exit code for an ended run: 0 only if it completed."""
    if ended.state == "COMPLETED":
        return ended.exit_code or 0
    return ended.exit_code or 1


def cancel(run: RunDir) -> str:
    """End the run's job immediately. Return a line that describes what was done.

    Raises:
        UserError: Slurm does not answer, so the job may go on.
    """
    check_own(run)
    now = status_of(run)
    if not now.active or now.job_id is None:
        return f"run {run.name} has no job to cancel: its state is {now.state}"
    if not in_slurm(run):
        _end_process(run, now)
    else:
        cancel_jobs([now])
    write_atomically(run.cancelled, f"{now.job_id}\n")
    saved = saved_by(run)
    left = f"{how_to_resume(run)} resumes from {saved}" if saved else "it had not saved anything yet"
    return f"cancelled job {now.job_id} of run {run.name}; {left}"


def how_to_resume(run: RunDir) -> str:
    """Return the command that starts a run again, which resumes from what it has saved."""
    if not in_slurm(run):
        return f"the same command with {naming_option(run)}"
    has_name = run.path.absolute() in [path.absolute() for path in named_paths(run.name)]
    return f"hpc-rl requeue {run.name if has_name else run.path}"


def naming_option(run: RunDir) -> str:
    """Return the option of `submit` that names an existing run; --job-name finds those directly below ROOT."""
    is_direct = run.path.absolute().parent == ROOT.absolute()
    return f"--job-name {run.name}" if is_direct else f"--run-dir {run.path}"


def saved_by(run: RunDir) -> str | None:
    """Return what a run has saved: its newest complete checkpoint, or the finished blocks of a generation."""
    newest = max((path.name for path in run.checkpoints.glob("step-*") if not path.suffix), default=None)
    blocks = len(list(run.response_parts.glob("*.jsonl")))
    return newest or (counted(blocks, "finished block") if blocks else None)


def stop(run: RunDir) -> str:
    """Ask the run to save as soon as it can and exit. Return a line that describes what was done."""
    check_own(run)
    now = status_of(run)
    if not now.active or now.job_id is None:
        return f"run {run.name} has no job to stop: its state is {now.state}"
    if now.state == "PENDING":
        cancel_jobs([now])
        return f"job {now.job_id} of run {run.name} was waiting; it was removed from the queue"
    ask_to_stop(run)
    then = f"{how_to_resume(run)} resumes it"
    return f"run {run.name} will save as soon as it can and exit with code {EXIT_STOPPED}; {then}"


def ask_to_stop(run: RunDir, reason: str = "user") -> None:
    """Write the stop file. If the reason is "requeue", the job script requeues the job."""
    write_atomically(run.stop, f"{reason}\n")


def cancel_jobs(active: Sequence[RunStatus]) -> None:
    """Cancel the jobs of some runs, and record in the run directories of waiting jobs that they were cancelled.

    Without accounting, Slurm forgets a waiting job within minutes, and a task of an array immediately.

    Raises:
        UserError: Slurm does not answer, or refuses.
    """
    if silent := next((now for now in active if now.is_last_recorded), None):
        raise UserError(
            f"job {silent.job_id} of run {silent.run} is not cancelled: its state is {silent.state} ({silent.reason}); "
            f"try again later, or let it save and exit, which needs no answer of Slurm: hpc-rl stop {silent.run}"
        )
    within_s = commands.LOOK_S if len(active) == 1 else commands.TIMEOUT_S
    cancel_ids([(str(now.job_id), RunDir(Path(now.run_dir))) for now in active], within_s)
    for now in active:
        run = RunDir(Path(now.run_dir))
        write_atomically(run.cancelled, f"{now.job_id}\n")
        if now.state == "PENDING":
            run.write_status(now.job_id, 0, "CANCELLED", None)


def cancel_waiting(waiting: Sequence[RunStatus]) -> list[RunStatus]:
    """Take jobs out of the queue, and record this in their run directories. One that has just started goes on.

    Returns:
        those that Slurm has cancelled.

    Raises:
        UserError: as `commands.cancel`, if some still wait.
    """
    runs, refusal = [RunDir(Path(now.run_dir)) for now in waiting], None
    try:
        cancel_ids([(str(now.job_id), run) for now, run in zip(waiting, runs, strict=True)], only_waiting=True)
    except UserError as error:  # also if one of them has just ended
        refusal = error
    after = statuses_of(runs, commands.TIMEOUT_S)
    gone = [now for now in after if now.state == CANCELLED]
    for now in gone:
        run = RunDir(Path(now.run_dir))
        write_atomically(run.cancelled, f"{now.job_id}\n")
        run.write_status(now.job_id, 0, CANCELLED, None)
    if refusal is not None and any(now.state == "PENDING" or now.is_last_recorded for now in after):
        raise refusal
    return gone


def cancel_ids(
    jobs: Iterable[tuple[str, RunDir]], within_s: float = commands.TIMEOUT_S, only_waiting: bool = False
) -> None:
    """Cancel jobs of some runs, each in its cluster.

    Raises:
        UserError: as `commands.cancel`.
    """
    for place, job_ids in by_place((job_id, place_of(run)) for job_id, run in jobs).items():
        commands.cancel(*job_ids, place=place, within_s=within_s, only_waiting=only_waiting)


def take_back(jobs: Sequence[tuple[str, RunDir]], error: BaseException) -> None:
    """Cancel jobs of several stages that were queued before an error.

    Raises:
        UserError: scancel failed, so that they are still there.
    """
    try:
        cancel_ids(jobs)
    except UserError as refused:
        job_ids = [job_id for job_id, _ in jobs]
        raise UserError(
            f"{str(error) or 'interrupted'}\njobs {', '.join(job_ids)} were queued before that and are still there, "
            f"because they cannot be cancelled ({refused}): cancel them with scancel {' '.join(job_ids)}"
        ) from error


def check_own(run: RunDir) -> None:
    """Check that a run belongs to this user.

    Raises:
        UserError: it does not.
    """
    if not is_own_folder(run.path.resolve()):
        raise UserError(f"run {run.name} belongs to another user, who may have written any job's id: {run.path}")


def _end_process(run: RunDir, now: RunStatus) -> None:
    job = run.read_job()
    if job.get("job_id") != now.job_id:
        raise UserError(
            f"run {run.name} was started without a job: end it where it runs, or let it save and exit "
            f"(hpc-rl stop {run.name})"
        )
    if job["host"] != os.uname().nodename:
        raise UserError(f"run {run.name} is a process on {job['host']}: cancel it there")
    pid = int(job["pid"])
    if process_alive(pid, int(job["start_time"])):
        os.kill(pid, signal.SIGTERM)
