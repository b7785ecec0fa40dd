"""What every process of a run sets up first: its log, its devices, and its place in the process group."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

import ray

from hpc_rl.run_dir import ENV_GROUP_DIR
from hpc_rl.system.accelerators import show_assigned
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.system.numa import bind_near


def begin(log: Path, sees_node: bool = False) -> None:
    """Set up what every process of a run needs first: its log, and a view of its own devices and no others.

    Its children have the same view. Call this before a library looks for devices.

    Args:
        sees_node: whether it keeps the view of Ray's own processes: all devices of the job on this node.
    """
    log_to(log)
    if not sees_node:
        show_assigned(os.environ, assigned_devices())


def log_to(path: Path) -> None:
    """Redirect the output of this process, including its libraries and children, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    tolerate_lost_output()  # Ray has replaced the streams with its own, which write to its session's folder


def quiet_libraries() -> None:
    """Keep lists of unused weights, progress bars, and messages for library authors out of the logs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def own_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder of mode 0700. In a job it is in Ray's folder, and removed even if this process is killed."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=os.environ.get("RAY_TMPDIR"))


def keep_temporary_files_in_the_job() -> None:
    """Set TMPDIR to Ray's folder of the job, for libraries in this process and for its children."""
    if folder := os.environ.get("RAY_TMPDIR"):
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None  # the folder that it has found before


def new_group_dir(logs: Path, is_on_one_node: bool) -> Path:
    """Return a new private folder in which the ranks of a process group meet (`hpc_rl.training.parallel.rendezvous`).

    Args:
        logs: a folder that all nodes share. A group on one node needs none: it uses Ray's folder in a job's temporary
            one, which is removed with it.
    """
    temporary = os.environ.get("RAY_TMPDIR") if is_on_one_node else None
    return Path(tempfile.mkdtemp(prefix=".group-", dir=temporary or logs))


def group_environment(rank: int, size: int, on_node: int, group_dir: Path) -> dict[str, str]:
    """Return the variables by which `hpc_rl.training.parallel.distributed` finds the process group.

    Args:
        on_node: number of the group's ranks on this node.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",  # the process sees its own device alone
        "LOCAL_WORLD_SIZE": str(on_node),
        ENV_GROUP_DIR: str(group_dir),
    }


def bind_near_device() -> None:
    """Keep this process on the CPUs next to its GPU, if the node entry found them."""
    for device in assigned_devices()[:1]:
        bind_near(os.environ, device)


def assigned_devices() -> list[str]:
    """Return the ids of the accelerators that Ray assigned to this process, of any vendor."""
    return [device for ids in ray.get_runtime_context().get_accelerator_ids().values() for device in ids]
