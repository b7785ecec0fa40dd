"""One node of a torchrun job: starts torchrun and its ranks from a Slurm task.

    srun --ntasks-per-node=1 python -m hpc_rl.node.torchrun --processes 8 -- -m hpc_rl.finetune.train --config FILE

The job script starts this once on each node. It exits with the code of the first rank that failed on any node.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.errors import EXIT_BAD_INPUT, EXIT_STOPPED, UserError
from hpc_rl.host.disk import tolerate_lost_output
from hpc_rl.host.files import Follower, tail
from hpc_rl.host.jit_caches import jit_cache_defaults
from hpc_rl.host.numa import numa_defaults
from hpc_rl.host.processes import end, forward_termination, shell_code, start
from hpc_rl.host.scratch import held_scratch
from hpc_rl.node.entry import add_common_options, print_error, run_with_others, worker_defaults
from hpc_rl.node.meeting import POLL_S, Meeting, Progress, named
from hpc_rl.node.network import choose_address, free_port
from hpc_rl.node.rank import ENV_NODE_RANK, ENV_NODES, RankExit, log_path, read_exits
from hpc_rl.run_dir import ENV_GROUP_DIR
from hpc_rl.slurm.allocation import Allocation

LOG_POLL_S = 0.5
"""Interval between reads of rank 0's log, which is on a shared file system."""
LINGER_S = 300
"""How long ranks may run after rank 0 has ended."""
LONGEST_PAUSE_S = 5.0
_SIGTERM_CODE = 128 + 15


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    return run_with_others(lambda allocation, meeting: _take_part(allocation, meeting, options))


def _take_part(allocation: Allocation, meeting: Meeting, options: argparse.Namespace) -> int:
    with held_scratch(os.environ, allocation.job_id, meeting.attempt_dir, allocation.node_rank) as scratch:
        interface, place = _rendezvous(allocation, meeting, options, scratch)
        environ = process_environment(os.environ, allocation, options, interface, scratch) | place
        command = torchrun_command(allocation, options.processes, str(scratch), options.program)
        with (meeting.attempt_dir / f"node{allocation.node_rank}.log").open("ab") as log:
            child = start(command, environ, log)
            try:
                asked_to_end = forward_termination(child)
                _supervise(child, meeting, options.start_timeout)
            finally:
                end(child)
    if child.returncode == 0:
        await_ranks(meeting.attempt_dir, options.processes * len(allocation.nodes), asked_to_end)
    return _outcome(child, allocation, meeting.attempt_dir)


def process_environment(
    environ: Mapping[str, str], allocation: Allocation, options: argparse.Namespace, interface: str, scratch: Path
) -> dict[str, str]:
    """Return the environment of the ranks. Variables that the user exported take precedence, except for TMPDIR.

    Args:
        scratch: folder on the node's own disk, which is removed at the end.
    """
    threads = allocation.threads(options.processes)
    workers = worker_defaults(options.device, interface, options.interface, threads)
    defaults = {**workers, **jit_cache_defaults(environ, scratch), **numa_defaults(environ, options.device)}
    return {**defaults, **environ, "TMPDIR": str(scratch)}


def torchrun_command(allocation: Allocation, processes: int, scratch: str, program: Sequence[str]) -> list[str]:
    """Return torchrun's command line for this node's ranks; `hpc_rl.node.rank` numbers them in Slurm's order of nodes.

    torchrun does not restart ranks: Slurm requeues the job.

    Args:
        scratch: folder for torchrun's own files, which it would otherwise create in /tmp.
    """
    return [
        *(sys.executable, "-P", "-m", "hpc_rl.node.agent"),
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=local",
        f"--rdzv-id={allocation.job_id}.{allocation.restart}",
        "--max-restarts=0",
        f"--log-dir={scratch}",
        "--monitor-interval=0.1",
        "--no-python",
        *(sys.executable, "-P", "-m", "hpc_rl.node.rank", "--", *program),
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.node.torchrun", description=__doc__)
    add_common_options(parser)
    parser.add_argument("--start-timeout", type=int, default=300, help="seconds within which all nodes must start")
    parser.add_argument("program", nargs="+", help="-- then SCRIPT or -m MODULE, and its arguments")
    return parser.parse_args(argv)


def _rendezvous(
    allocation: Allocation, meeting: Meeting, options: argparse.Namespace, scratch: Path
) -> tuple[str, dict[str, str]]:
    """Return the interface of this node, and variables by which the ranks find their place and each other.

    hpc-rl's own programs meet in a private folder. MASTER_ADDR and MASTER_PORT are for programs that open a store of
    torch. They are not on a command line, which everyone on the node can read.
    """
    others = [name for name in allocation.nodes if name != allocation.node]
    interface, address = choose_address(options.interface, others[0] if others else None)
    if allocation.is_head:
        meeting.publish(f"{address}:{free_port(address)}:{secrets.token_hex(8)}")
    host, port, name = meeting.await_address(options.start_timeout).split(":")
    # One node needs no shared file system, and no file locks on one.
    folder = meeting.attempt_dir if len(allocation.nodes) > 1 else scratch
    return interface, {
        ENV_NODE_RANK: str(allocation.node_rank),
        ENV_NODES: str(len(allocation.nodes)),
        ENV_GROUP_DIR: str(folder / f".group-{name}"),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def _supervise(child: subprocess.Popen[bytes], meeting: Meeting, start_timeout: float) -> None:
    """Wait until torchrun ends. The first node prints rank 0's output and checks that all nodes start."""
    if meeting.node_rank != 0:
        child.wait()
        return
    rank0 = Follower(log_path(meeting.attempt_dir, 0, 0))
    deadline = time.monotonic() + start_timeout
    missing, progress = meeting.missing(), Progress()
    while child.poll() is None:
        time.sleep(POLL_S if missing else LOG_POLL_S)
        print(rank0.new_text(), end="", flush=True)
        missing = missing and meeting.missing()
        if missing:
            progress.show(meeting.attendance)
        if missing and time.monotonic() > deadline:
            raise UserError(
                f"{named(missing)} did not start within {start_timeout:.0f} s (slurm.start_timeout_s); "
                f"the logs are in {meeting.attempt_dir}"
            )
    print(rank0.new_text(), end="", flush=True)


def await_ranks(attempt_dir: Path, ranks: int, asked_to_end: threading.Event) -> None:
    """Wait until all ranks have ended: soon after the first node's task has ended, srun ends the other tasks (--wait).

    Rank 0 may export the model for as long as the walltime allows. Others that still run LINGER_S after it count as
    hanging.
    """
    linger_until, pause_s = math.inf, POLL_S
    while not asked_to_end.wait(pause_s) and time.monotonic() < linger_until:
        ended = read_exits(attempt_dir)
        if len(ended) >= ranks or any(one.exit_code for one in ended):
            return
        if any(one.rank == 0 for one in ended):
            linger_until = min(linger_until, time.monotonic() + LINGER_S)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)  # all nodes read this folder, which is on a shared file system


def _outcome(child: subprocess.Popen[bytes], allocation: Allocation, attempt_dir: Path) -> int:
    """Return the exit code of the job's first failed rank, the same on every node. Its node explains the failure."""
    if child.returncode == 0:
        return 0
    failed = [ended for ended in read_exits(attempt_dir) if ended.exit_code != 0]
    # Ranks that were terminated after the first failure are not the cause.
    causes = [ended for ended in failed if ended.exit_code != _SIGTERM_CODE] or failed
    if not causes:
        log = attempt_dir / f"node{allocation.node_rank}.log"
        code = shell_code(child.returncode)
        print_error(f"torchrun on node {allocation.node} ended with exit code {code}; the end of {log}:\n{tail(log)}")
        return code
    first = causes[0]
    if first.exit_code != EXIT_STOPPED and first.node_rank == allocation.node_rank:
        _explain(first, allocation.node, attempt_dir)
    return first.exit_code


def _explain(first: RankExit, node: str, attempt_dir: Path) -> None:
    """Print how the first rank failed. Rank 0's log was printed while it ran."""
    log = log_path(attempt_dir, first.node_rank, first.rank)
    end_of_log = "" if first.rank == 0 else tail(log)
    if first.exit_code == EXIT_BAD_INPUT and not end_of_log:
        return  # rank 0 has printed the message
    meaning = (
        " (killed, usually for lack of memory: ask for more --mem, or let each process hold less)"
        if first.exit_code == 128 + 9
        else ""
    )
    print_error(
        f"rank {first.rank} on node {node} failed with exit code {first.exit_code}{meaning}; its log is {log}"
        + (f" and ends:\n{end_of_log}" if end_of_log else "")
    )


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main())
