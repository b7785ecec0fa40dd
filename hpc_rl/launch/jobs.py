"""Starting, watching and ending the job of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.launch import runs
from hpc_rl.launch.render import Job
from hpc_rl.launch.snapshot import git_snapshot
from hpc_rl.process import held_interrupts
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm import commands

STATE_POLL_S = (1.0, 15.0)
"""First and last interval between two questions to Slurm: many users share its controller."""


def check_free(run: RunDir) -> None:
    """A run directory holds one job at a time.

    Raises:
        UserError: its job is queued or running, or the folder holds something else.
    """
    if not run.path.exists():
        return
    if not runs.is_run(run.path) and any(run.path.iterdir()):
        raise UserError(f"{run.path} is not empty and no run directory; choose another --run-dir or --job-name")
    now = runs.status(run)
    if now.active:
        raise UserError(
            f"run {run.name} is {now.state} as job {now.job_id} in {run.path}: "
            f"wait for it, end it (hpc-rl stop {run.name}), or choose another --job-name"
        )


def reserve(path: Path) -> bool:
    """Make a run's or sweep's folder; False where somebody else was faster, so that two submissions never share one."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        return False
    return True


def prepare(job: Job, script: str, job_id: str | None) -> None:
    """Fill the run directory: script, snapshot of the code, and job.json once there is a job."""
    job.run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(job.run_dir.script, script)
    _write(job.run_dir.git, git_snapshot(job.working_dir))
    if job_id is not None:
        record(job, job_id)


def record(job: Job, job_id: str, **more: object) -> None:
    """Write job.json."""
    facts = {
        "job_id": job_id,
        "kind": job.kind,
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "working_dir": str(job.working_dir),
        **more,
    }
    _write(job.run_dir.job, json.dumps(facts, indent=2) + "\n")


def record_again(run: RunDir, job_id: str) -> None:
    """Write job.json, and what code there is now, for a run that was submitted again as it was."""
    before = runs.read_json(run.job)
    folder = Path(str(before.get("working_dir", Path.cwd())))
    _write(run.git, git_snapshot(folder))
    now = {"job_id": job_id, "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": sys.argv}
    _write(run.job, json.dumps({**before, **now}, indent=2) + "\n")


def require_slurm() -> None:
    if not commands.available():
        raise UserError("no sbatch on PATH: run this on a login node of a Slurm cluster, or here with --local")


def submit(job: Job, script: str) -> str:
    """Queue the script; the job id.

    Raises:
        UserError: sbatch refused; then, and after Ctrl-C, nothing is left behind.
    """
    made = not job.run_dir.path.exists() or not any(job.run_dir.path.iterdir())
    job.run_dir.stop.unlink(missing_ok=True)  # an earlier job's
    job_id = None
    try:
        prepare(job, script, None)
        job_id = queue(script, job.after.sbatch_options if job.after else [])
    finally:
        if job_id is None and made and job.run_dir.path.exists():
            remove(job.run_dir.path)
    record(job, job_id, **({"after": job.after.target} if job.after else {}))
    return job_id


def queue(script: str, options: Sequence[str] = ()) -> str:
    """Hand a script to sbatch; the job id.

    Ctrl-C waits for sbatch's answer, which has a deadline: a submission that is cut off may have gone through.

    Raises:
        UserError: sbatch refused.
        KeyboardInterrupt: the user wants no job any more, and it is cancelled.
    """
    from hpc_rl.launch.executor import ScriptExecutor

    with held_interrupts() as interrupted, tempfile.TemporaryDirectory() as folder:
        job_id = ScriptExecutor(Path(folder), script, options).submit_script().job_id
    if interrupted():
        commands.cancel(job_id)
        raise KeyboardInterrupt
    return job_id


def wait(run: RunDir, on_poll: Callable[[], None] = lambda: None) -> int:
    """Block until the run's job has ended; its exit code. `on_poll` is called several times a second.

    A job that is queued again after its walltime's warning has not ended.
    """
    interval, most = STATE_POLL_S
    next_look, seen = 0.0, None
    while True:
        on_poll()
        written = run.status.stat().st_mtime_ns if run.status.exists() else None
        if time.monotonic() >= next_look or written != seen:  # the job wrote where it is: worth a question at once
            now = runs.status(run)
            if not now.active:
                on_poll()
                return exit_code(now)
            interval, next_look, seen = min(interval * 1.3, most), time.monotonic() + interval, written
        time.sleep(0.2)


def exit_code(ended: runs.RunStatus) -> int:
    """The exit code that stands for a run's end: never 0 unless it was completed."""
    if ended.state == "COMPLETED":
        return ended.exit_code or 0
    return ended.exit_code or 1


def cancel(run: RunDir) -> str:
    """End the run's job now; what was done, in a line."""
    now = runs.status(run)
    if not now.active or now.job_id is None:
        return f"run {run.name} has no job to cancel: it is {now.state}"
    if not runs.in_slurm(run):
        _end_process(run)
    else:
        commands.cancel(now.job_id)
        note_cancelled(now)
    saved = max((path.name for path in run.checkpoints.glob("step-*") if not path.suffix), default=None)
    left = f"submitting it again goes on from {saved}" if saved else "it had saved no checkpoint yet"
    return f"cancelled job {now.job_id} of run {run.name}; {left}"


def stop(run: RunDir) -> str:
    """Ask the run to save at the next step and leave; what was done, in a line."""
    now = runs.status(run)
    if not now.active or now.job_id is None:
        return f"run {run.name} has nothing to stop: it is {now.state}"
    if now.state == "PENDING":
        commands.cancel(now.job_id)
        note_cancelled(now)
        return f"job {now.job_id} of run {run.name} was waiting; took it out of the queue"
    ask_to_stop(run)
    return f"run {run.name} will save at its next step and leave with exit code {EXIT_STOPPED}"


def ask_to_stop(run: RunDir, reason: str = "user") -> None:
    """Write the stop file. Where its reason is "requeue", the job script queues the job again."""
    _write(run.stop, f"{reason}\n")


def note_cancelled(pending: runs.RunStatus) -> None:
    """Keep in the run directory that a job which was waiting is cancelled: Slurm forgets it within minutes, and a task
    of an array at once.
    """
    if pending.state == "PENDING":
        facts = {"job_id": pending.job_id, "attempt": 0, "state": "CANCELLED", "exit_code": None}
        _write(RunDir(Path(pending.run_dir)).status, json.dumps(facts) + "\n")


def _end_process(run: RunDir) -> None:
    job = runs.read_json(run.job)
    if job["host"] != os.uname().nodename:
        raise UserError(f"run {run.name} is a process on {job['host']}: cancel it there")
    pid = int(job["pid"])
    if runs.process_alive(pid, int(job["start_time"])):
        os.kill(pid, signal.SIGTERM)


def remove(folder: Path) -> None:
    """Take away a run's or sweep's folder that was made for nothing, and an empty ./runs."""
    shutil.rmtree(folder)
    if folder.parent == runs.ROOT.absolute() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
