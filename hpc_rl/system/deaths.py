"""How a process ended, in words: what its exit code means, and whether the kernel killed it for lack of memory."""

from __future__ import annotations

import signal
from collections.abc import Mapping, MutableMapping

from hpc_rl.system.cgroups import oom_kills, own_cgroups

ENV_OOM_KILLS = "HPC_RL_OOM_KILLS"
"""Number of the processes of this cgroup that the kernel had killed for lack of memory before the job began."""
KILLED = 128 + signal.SIGKILL


def remember_oom_kills(environ: MutableMapping[str, str]) -> None:
    """Set the variable by which this process and its descendants find out whether the kernel kills one from now on."""
    count = oom_kills(own_cgroups())
    environ.pop(ENV_OOM_KILLS, None)
    if count is not None:
        environ[ENV_OOM_KILLS] = str(count)


def ran_out_of_memory(environ: Mapping[str, str]) -> bool | None:
    """Return whether the kernel has killed a process of this cgroup for lack of memory since `remember_oom_kills`.

    Returns:
        None if the kernel does not count that here.
    """
    count = oom_kills(own_cgroups())
    if count is None or ENV_OOM_KILLS not in environ:
        return None
    return count > int(environ[ENV_OOM_KILLS])


def kill_cause(out_of_memory: bool | None, remedy: str) -> str:
    """Return what is known about a process that SIGKILL ended.

    Args:
        out_of_memory: see `ran_out_of_memory`, on the process's node.
        remedy: what to do if it needed too much memory.
    """
    if out_of_memory:
        return f"killed for lack of memory: {remedy}"
    counted = (
        "the kernel's counter is not readable here"
        if out_of_memory is None
        else "though the kernel counted no such kill in the job's cgroup"
    )
    return f"killed (signal 9) by a user or a program, or for lack of memory ({counted}); if it was memory, {remedy}"


def meaning_of(exit_code: int, out_of_memory: bool | None, remedy: str) -> str:
    """Return what the exit code of a process means if a signal ended it: ` (...)`, or an empty text."""
    if exit_code == KILLED:
        return f" ({kill_cause(out_of_memory, remedy)})"
    number = exit_code - 128
    return f" (signal {number}, {signal.Signals(number).name})" if number in list(signal.Signals) else ""
