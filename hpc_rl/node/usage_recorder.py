"""Records what this node's part of the job uses, in a small process next to the node entry.

    python -m hpc_rl.node.usage_recorder FILE PID

appends lines about process PID and its descendants to FILE until its parent ends. It is a separate process, so that a
driver or a file system that hangs does not hold up the job.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.formats.usage import UsageSample, append_line, sample_line, usage_file
from hpc_rl.node.gpus import measure_gpus
from hpc_rl.node.ray_cluster.limits import memory_limit
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.system.processes import descendants, start

INTERVAL_S = (2.0, 60.0)
"""Shortest and longest time between two samples."""
MAX_BYTES = 16 << 20
"""Largest size of a file: months of a node with 8 GPUs."""
END_TIMEOUT_S = 2.0


def recording_usage(allocation: Allocation, attempt_dir: Path, part: Callable[[], int]) -> int:
    """Run this node's part of the job, record what it uses, and return the part's exit code."""
    path = usage_file(attempt_dir, allocation.node_rank)
    append_line(
        path,
        {
            "time": round(time.time(), 1),
            "node": allocation.node,
            "job_id": allocation.job_id,
            "cpus": allocation.cpus,
            "memory_gb": round(memory_limit(allocation, os.environ) / 1e9, 3),
        },
    )
    command = [sys.executable, "-P", "-m", "hpc_rl.node.usage_recorder", str(path), str(os.getpid())]
    sampler = None
    with contextlib.suppress(OSError):  # the limit on processes is reached
        sampler = start(command, os.environ, sys.stderr.buffer)
    code = 1
    try:
        code = part()
        return code
    except UserError as error:
        code = error.exit_code
        raise
    finally:
        if sampler is not None:
            sampler.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sampler.wait(END_TIMEOUT_S)
        append_line(path, {"time": round(time.time(), 1), "exit_code": code})


def main(path: Path, root: int) -> None:
    """Append samples of process `root` and its descendants, until the file is full or the parent ends this process."""
    began = time.monotonic()
    before, since = resource_usage(root), began
    while _size(path) < MAX_BYTES:
        time.sleep(interval(time.monotonic() - began))
        now, at = resource_usage(root), time.monotonic()
        cpus = max(0.0, now.cpu_s - before.cpu_s) / (at - since)
        append_line(path, sample_line(UsageSample(time.time(), cpus, now.memory / 1e9, measure_gpus(os.environ))))
        before, since = now, at


def interval(elapsed_s: float) -> float:
    """Return the seconds to the next sample, which grow with the length of the run."""
    least, most = INTERVAL_S
    return min(most, max(least, elapsed_s / 60))


@dataclass(frozen=True)
class ResourceUsage:
    """CPU time and memory of a group of processes."""

    cpu_s: float
    """CPU time so far in seconds, including that of ended processes."""
    memory: int
    """Bytes, without the file cache, which the kernel can reclaim."""


def resource_usage(root: int, proc: Path = Path("/proc")) -> ResourceUsage:
    """Measure a process and its descendants.

    Memory is the private memory of all processes plus the largest shared memory of one of them, because Ray's processes
    map the same object store (proc(5): status, RssAnon and RssShmem).
    """
    ticks, own, shared = 0, 0, 0
    for pid in {root, *descendants(root)} - {os.getpid()}:
        with contextlib.suppress(OSError):
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
            lines = (proc / str(pid) / "status").read_text().splitlines()
            kilobytes = {
                name: int(rest.split()[0])
                for name, _, rest in (line.partition(":") for line in lines)
                if name in ("RssAnon", "RssShmem")
            }
            own += kilobytes.get("RssAnon", 0)
            shared = max(shared, kilobytes.get("RssShmem", 0))
    return ResourceUsage(ticks / os.sysconf("SC_CLK_TCK"), (own + shared) << 10)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
