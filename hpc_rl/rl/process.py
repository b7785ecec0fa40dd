"""What every worker process sets up first: its log, and its place in the process group."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import ray

from hpc_rl.host.accelerators import unrestricted_by_ray, visible_devices
from hpc_rl.host.disk import tolerate_lost_output
from hpc_rl.host.numa import bind_near
from hpc_rl.run_dir import ENV_GROUP_DIR


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
    """Return a new private folder in which the ranks of a process group meet (`hpc_rl.training.rendezvous`).

    Args:
        logs: a folder that all nodes share. A group on one node needs none: it uses Ray's folder in a job's temporary
            one, which is removed with it.
    """
    temporary = os.environ.get("RAY_TMPDIR") if is_on_one_node else None
    return Path(tempfile.mkdtemp(prefix=".group-", dir=temporary or logs))


def group_environment(rank: int, size: int, on_node: int, group_dir: Path, local_rank: int) -> dict[str, str]:
    """Return the variables by which `hpc_rl.training.distributed` finds the process group.

    Args:
        on_node: number of the group's ranks on this node.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(on_node),
        ENV_GROUP_DIR: str(group_dir),
    }


def local_rank(environ: Mapping[str, str], assigned: list[str]) -> int:
    """Return the index of this process's device among those that it sees.

    By default Ray shows a worker only its own devices, so the index is 0. If the user has switched that off, the
    process sees all devices of the node, and its own is the one that Ray assigned.

    Args:
        assigned: ids of the accelerators that Ray assigned; empty on CPUs.
    """
    row = unrestricted_by_ray(environ)
    if row is None or not assigned:
        return 0
    visible = visible_devices(environ, row.device)
    return visible.index(assigned[0]) if visible else int(assigned[0])


def narrow_devices(environ: MutableMapping[str, str], assigned: list[str]) -> None:
    """Hide other devices from this process, if the user stopped Ray from doing so. Call this before torch uses one."""
    row = unrestricted_by_ray(environ)
    if row is not None and assigned:
        environ[row.visible[0]] = ",".join(assigned)


def bind_near_device() -> None:
    """Keep this process on the CPUs next to its GPU, if the node entry found them."""
    for device in assigned_devices()[:1]:
        bind_near(os.environ, device)


def assigned_devices() -> list[str]:
    """Return the ids of the accelerators that Ray assigned to this process, of any vendor."""
    return [device for ids in ray.get_runtime_context().get_accelerator_ids().values() for device in ids]
