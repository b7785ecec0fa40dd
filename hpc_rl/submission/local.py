"""A job on this machine: the same node entries as under Slurm, as local processes with a simulated allocation."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.images.run_options import has_container_script
from hpc_rl.images.runtimes import find_program, missing, runtime_of
from hpc_rl.run_dir import ENV_ATTEMPT_DIR, ENV_RUN_DIR, read_outcome
from hpc_rl.runs.status import STOPPED, job_log, process_start_time
from hpc_rl.software.ray_token import TOKEN
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.resources import cpus_per_node
from hpc_rl.submission.script.environment import job_environment
from hpc_rl.submission.script.render import job_python, node_options, render_container
from hpc_rl.system.accelerators import find_accelerators, visible_devices, visible_variable
from hpc_rl.system.files import open_to_append, write_atomically
from hpc_rl.system.processes import adopt_orphans, end, end_descendants, shell_code, start
from hpc_rl.system.scratch import job_folders, remove_scratch

POLL_S = 0.1
_CANCELLED = 128 + signal.SIGTERM
_CONTAINER = "container.sh"


def run_local(job: Job, script: str, on_poll: Callable[[], None]) -> int:
    """Run the job on this machine to its end and return its exit code.

    The first Ctrl-C asks the job to save and exit; the second one ends it immediately.
    """
    job_id = f"local-{os.getpid()}"
    with queue.reserved(job):
        lock = job.run_dir.take_lock(job_id)
        queue.prepare(job, script)
        host, began = os.uname().nodename, process_start_time(os.getpid())
        queue.record(job, job_id, host=host, pid=os.getpid(), start_time=began)
    attempt = job.run_dir.next_attempt()
    attempt.mkdir(mode=0o700)
    job.run_dir.stop.unlink(missing_ok=True)
    if (settings := job.settings) is not None:
        write_atomically(attempt / job.run_dir.config.name, settings)  # what this attempt runs with
    if has_container_script(job.config.container):
        write_atomically(attempt / _CONTAINER, render_container(job))
    _report(job, job_id, "RUNNING", None)
    code = 1
    try:
        code = _run_nodes(job, job_id, attempt, on_poll)
        agreed = read_outcome(attempt)
        code = code if agreed is None or code == _CANCELLED else agreed
    finally:
        states = {0: "COMPLETED", EXIT_STOPPED: STOPPED, _CANCELLED: "CANCELLED"}
        _report(job, job_id, states.get(code, "FAILED"), code)
        job.run_dir.stop.unlink(missing_ok=True)
        lock.close()
    return code


def check_local(job: Job) -> None:
    """Check that the job can run without Slurm.

    Raises:
        UserError: this machine has fewer GPUs, or its container runtime needs srun, or is not installed.
    """
    trainer = job.config.trainer
    kind, found = find_accelerators(os.environ)
    asked = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.uses_gpus and 0 < found < asked:
        raise UserError(
            f"the job needs {asked} GPUs (trainer.nnodes {trainer.nnodes} x trainer.n_gpus_per_node "
            f"{trainer.n_gpus_per_node}), and this shell may use {found} of this machine's "
            f"({visible_variable(os.environ, kind)}): lower --gpus-per-node, or use a machine with more"
        )
    settings = job.config.container
    if settings.image is None:
        return
    if not has_container_script(settings):
        raise UserError(
            f"container.runtime={settings.runtime} is a plug-in of srun and does not work with --local: use apptainer"
        )
    programs = runtime_of(settings).programs
    if find_program(programs) is None:
        raise UserError(f"--local in an image: {missing(programs)}; load its module")


def node_environment(
    job: Job, job_id: str, attempt: Path, node_rank: int, environ: Mapping[str, str], cpus: int
) -> dict[str, str]:
    """Return the environment of one node's entry: the variables that Slurm would set. All nodes have this host's name.

    Args:
        cpus: CPUs of this machine, shared by the nodes. A node gets at least as many as it would request from Slurm, so
            that what runs on a cluster also runs here, if slower.
    """
    trainer = job.config.trainer
    asked = cpus_per_node(job.config)
    outside = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    host = os.uname().nodename
    gpus = {}
    if trainer.uses_gpus:
        visible = visible_devices(outside, trainer.computes_on)
        every = visible or list(map(str, range(trainer.nnodes * trainer.n_gpus_per_node)))
        first = node_rank * trainer.n_gpus_per_node
        own = ",".join(every[first : first + trainer.n_gpus_per_node])
        gpus[visible_variable(outside, trainer.computes_on)] = own
    return {
        **outside,
        **job_environment(job.config),
        **gpus,
        ENV_RUN_DIR: str(job.run_dir.path),
        ENV_ATTEMPT_DIR: str(attempt),
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": ",".join([host] * trainer.nnodes),
        "SLURM_NODEID": str(node_rank),
        "SLURM_CPUS_ON_NODE": str(max(asked, cpus // trainer.nnodes)),
    }


def node_command(job: Job, attempt: Path) -> list[str]:
    python = job_python(job.config)
    inside = ["bash", str(attempt / _CONTAINER)] if has_container_script(job.config.container) else []
    program = list(job.program)
    if job.row.trainer is not None:
        interpreter = [] if job.row.node_entry == "hpc_rl.node.torchrun" else [python]
        settings = str(attempt / job.run_dir.config.name)
        program = [*interpreter, "-P", *job.row.trainer_command, "--config", settings]
    options = node_options(job, local=True)
    return [*inside, python, "-P", "-m", job.row.node_entry, *options, *(["--", *program] if program else [])]


def _run_nodes(job: Job, job_id: str, attempt: Path, on_poll: Callable[[], None]) -> int:
    cpus = len(os.sched_getaffinity(0))
    nodes: list[subprocess.Popen[bytes]] = []
    environs = [
        node_environment(job, job_id, attempt, rank, os.environ, cpus) for rank in range(job.config.trainer.nnodes)
    ]
    adopt_orphans()
    interrupts = count_interrupts(job)
    try:
        with open_to_append(job_log(job.run_dir, job_id)) as log:
            for environ in environs:
                nodes.append(start(node_command(job, attempt), environ, log, new_session=True))
        while True:
            on_poll()
            codes = [node.poll() for node in nodes]
            failed = [shell_code(code) for code in codes if code]
            if failed:
                return failed[0]
            if all(code == 0 for code in codes):
                return 0
            if interrupts() > 1:
                return _CANCELLED
            time.sleep(POLL_S)
    finally:
        # Like srun --kill-on-bad-exit: signal all nodes before waiting for the first.
        for node in nodes:
            node.terminate()
        for node in nodes:
            end(node)
        # Processes that a killed entry left behind.
        end_descendants()
        for folder in job_folders(environs[0], job_id):
            remove_scratch(folder)
        (attempt / TOKEN).unlink(missing_ok=True)
        on_poll()


def count_interrupts(job: Job) -> Callable[[], int]:
    """Handle Ctrl-C and SIGTERM: the first Ctrl-C writes the stop file.

    Returns:
        A function that returns the number of requests to end so far; SIGTERM counts as two.
    """
    count = 0

    def interrupted(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 2 if number == signal.SIGTERM else 1
        if count == 1:
            write_atomically(job.run_dir.stop, "user\n")
            print("\nhpc-rl: saving and exiting; Ctrl-C again to end immediately", file=sys.stderr)

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    return lambda: count


def _report(job: Job, job_id: str, state: str, exit_code: int | None) -> None:
    """Record the state, unless the disk is full: that must not replace the outcome."""
    with contextlib.suppress(OSError):
        job.run_dir.write_status(job_id, job.run_dir.last_attempt(), state, exit_code)
