"""How the ranks of a process group find each other: files in a private folder that all of them see.

torch's own store is a TCP server on all interfaces that trusts everyone who connects. This folder belongs to the user,
and nobody else can write to it, so the addresses and keys that torch puts there come from ranks of this job.

Ranks wait for the slowest one by listing the folder, with growing pauses: each of them would read the file of torch's
FileStore 100 times per second, which a network file system notices.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from hpc_rl.errors import UserError
from hpc_rl.system.accelerators import visible_devices
from hpc_rl.system.files import write_atomically
from hpc_rl.system.locks import REMEDY, is_locked

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
_NCCL_LOOKS_EVERY = ("TORCH_NCCL_COORD_CHECK_MILSEC", "10000")
"""How often a thread of each rank asks the store whether another rank has failed; by default every second."""
_RANK = "rank-"
_LOCK = "lock"


def meet(folder: Path, rank: int, size: int, timeout_s: float) -> dist.Store:
    """Return a store that only this group uses, after all of its ranks have arrived.

    Args:
        folder: a private folder that all ranks see. It is created if it does not exist; it serves one group.

    Raises:
        UserError: a rank did not arrive in time, another group used the folder, someone else can write to it, or its
            file locks do not work between the nodes.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        refuse_others(folder)
        if rank == 0:
            _lock(folder)
        _arrive(folder, rank)
        hosts = _await_all(folder, size, timeout_s)
        if rank != 0:
            _require_locks(folder, hosts[0] == hosts[rank])
    except (FileExistsError, BlockingIOError) as error:
        raise UserError(f"another process group has used {folder}: each group needs a new folder") from error
    except OSError as error:
        raise UserError(
            f"rank {rank} cannot use {folder}, in which the ranks meet: {error.strerror}; if the file system has no "
            "locks (Lustre without the mount option flock), put the run directory on another one"
        ) from error
    refuse_slices(hosts)
    os.environ.setdefault(*_NCCL_LOOKS_EVERY)
    return dist.PrefixStore("hpc_rl", dist.FileStore(str(folder / "store"), -1))


def refuse_others(folder: Path) -> None:
    """Check that only this user can write to a folder.

    Raises:
        UserError: it belongs to someone else, others can write to it, or it is not a folder but a link.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UserError(
            f"{folder}, in which the ranks meet, must be a folder that belongs to user {os.geteuid()} and that nobody "
            f"else can write to; it has owner {found.st_uid} and mode {stat.filemode(found.st_mode)}"
        )


def refuse_slices(hosts: Sequence[str]) -> None:
    """Check that no other rank on this node uses a slice of a GPU (MIG), if this one does.

    Args:
        hosts: the host of each rank.

    Raises:
        UserError: one does. https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
    """
    if not any(name.startswith("MIG-") for name in visible_devices(os.environ, "cuda") or []):
        return
    host = socket.gethostname()
    here = sum(other == host for other in hosts)
    if here > 1:
        raise UserError(
            f"{here} ranks on {host} would use slices of GPUs (MIG), but CUDA shows a process only one slice, and NCCL "
            "cannot connect two slices of one GPU: use one process per node (--gpus-per-node 1), or request whole GPUs"
        )


def _arrive(folder: Path, rank: int) -> None:
    """Record that a rank has arrived, and on which host.

    Raises:
        FileExistsError: another process was this rank.
    """
    mark = folder / f"{_RANK}{rank}"
    if mark.exists():
        raise FileExistsError(mark)
    write_atomically(mark, socket.gethostname())


def _lock(folder: Path) -> int:
    """Lock a file of the folder until this process ends, so that the other ranks can test the locks."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _require_locks(folder: Path, is_with_rank0: bool) -> None:
    """Check that this rank sees the lock of rank 0. torch's FileStore relies on locks.

    Args:
        is_with_rank0: whether rank 0 is on this host, where locks always work.

    Raises:
        UserError: it does not: rank 0 has ended, or locks are local to each node.
    """
    if is_locked(folder / _LOCK):
        return
    if is_with_rank0:
        raise UserError("rank 0 ended while the ranks met: its log has the reason")
    raise UserError(
        "rank 0 ended while the ranks met, and its log has the reason; or, if rank 0 still runs, "
        f"file locks do not reach from node to node in {folder}, and the ranks need them to meet: {REMEDY}"
    )


def _await_all(folder: Path, size: int, timeout_s: float) -> list[str]:
    """Wait until all ranks have arrived and return their hosts.

    Raises:
        UserError: a rank did not arrive in time.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    marks = [f"{_RANK}{rank}" for rank in range(size)]
    while missing := _absent(folder, marks):
        if time.monotonic() > deadline:
            raise UserError(
                f"{size} ranks must start within {timeout_s:.0f} s (start_timeout_s), and these did not: {missing}; "
                "look for their errors in their logs"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return [(folder / mark).read_text() for mark in marks]


def _absent(folder: Path, marks: Sequence[str]) -> list[int]:
    """Return the ranks that have not arrived. Listing the folder also refreshes the view of an NFS client."""
    there = {path.name for path in folder.iterdir()}
    return [rank for rank, mark in enumerate(marks) if mark not in there]
