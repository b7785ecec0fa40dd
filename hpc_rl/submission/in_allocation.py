"""A job inside an existing allocation (salloc): bash runs its script immediately."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.runs.status import job_log, process_start_time
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.local import POLL_S, count_interrupts
from hpc_rl.submission.script.directives import LOGIN_SHELL
from hpc_rl.system.files import open_to_append
from hpc_rl.system.processes import adopt_orphans, end_descendants, shell_code, start

END_S = 90.0
"""Between SIGTERM and SIGKILL. srun waits for its step for 2 s longer than KillWait, which is 30 s by default, and the
script's clean-up takes up to 20 s; the rest is for a busy machine."""
_SIZES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_CPUS_PER_TASK")
"""The size requested from salloc. srun would use it as the size of the step (srun(1), INPUT ENVIRONMENT)."""

_BINDINGS = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
"""The binding of the surrounding job step's task. srun would take it as a request for every task."""


def step_environment(environ: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return the environment that sbatch would set for the script: one task per node, with all CPUs allocated there.

    Raises:
        UserError: this shell is not inside an allocation, or the allocation has fewer nodes.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        raise UserError("--in-allocation: no allocation found (SLURM_JOB_ID is not set); create one with salloc")
    granted = int(environ.get("SLURM_JOB_NUM_NODES") or 1)
    if nodes > granted:
        raise UserError(
            f"--in-allocation: the job requests {counted(nodes, 'node')}, but allocation {job_id} has {granted}: "
            "lower --nodes"
        )
    found = {name: value for name, value in environ.items() if name not in _SIZES}
    cpus = [int(count) for count in re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    sizes = {"SLURM_JOB_NUM_NODES": str(nodes)} | ({"SLURM_CPUS_PER_TASK": str(min(cpus))} if cpus else {})
    if "SLURM_STEP_ID" in environ:
        # This shell is inside a job step (srun --pty, Jupyter), which holds its resources: srun would wait for its end.
        found = {name: value for name, value in found.items() if not name.startswith(_BINDINGS)} | {
            "SLURM_OVERLAP": "1"
        }
    return {**found, **sizes}


def run_in_allocation(job: Job, script: str, on_poll: Callable[[], None]) -> int:
    """Run the job to its end and return its exit code.

    The first Ctrl-C asks the job to save and exit; the second one ends it immediately. Slurm announces the end of an
    allocation only to processes that it started itself, so the job does not save automatically before that.
    """
    environ = step_environment(os.environ, job.config.trainer.nnodes)
    job_id = environ["SLURM_JOB_ID"]
    with queue.reserved(job):
        job.run_dir.stop.unlink(missing_ok=True)
        queue.prepare(job, script)
        owner = {"host": os.uname().nodename, "pid": os.getpid(), "start_time": process_start_time(os.getpid())}
        queue.record(job, job_id, None, **owner, nodes=environ.get("SLURM_JOB_NODELIST", ""))
    adopt_orphans()
    interrupts = count_interrupts(job)
    with open_to_append(job_log(job.run_dir, job_id)) as log:
        login = ["-l"] if script.startswith(LOGIN_SHELL) else []
        shell = start(["bash", *login, str(job.run_dir.script)], environ, log, new_session=True)
    try:
        while shell.poll() is None and interrupts() < 2:
            on_poll()
            time.sleep(POLL_S)
    finally:
        _end(shell)
        on_poll()
    return shell_code(shell.returncode)


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End the script and its srun, which ends the step on the nodes. Afterwards the script's exit code is known."""
    deadline = time.monotonic() + END_S
    if shell.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
        try:
            shell.wait(END_S)
        except subprocess.TimeoutExpired:
            shell.kill()
            shell.wait()  # the waits below would take its exit code
    with suppress(ChildProcessError):  # an srun that the script left behind is now a child of this process
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(POLL_S)
    end_descendants()
