"""One node of a torchrun job: starts torchrun and its ranks from a Slurm task.

    srun --ntasks-per-node=1 python -m hpc_rl.node.torchrun --processes 8 -- -m hpc_rl.finetune.train --config FILE

The job script starts this once on each node. All of them exit with the code on which they agree (`hpc_rl.node.ending`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.adapters.table import GENERIC
from hpc_rl.errors import EXIT_STOPPED, RunError, UserError
from hpc_rl.liveness.heartbeat import ENV_HEARTBEATS, HEARTBEATS
from hpc_rl.node.adapted import AdaptedProgram, adapted
from hpc_rl.node.causes import End
from hpc_rl.node.ending import leave, print_cause, settle
from hpc_rl.node.entry import add_common_options, repaired, run_with_others, worker_defaults
from hpc_rl.node.hangs.watch import HangWatch, WatchedNode, watching
from hpc_rl.node.network import choose_address, free_port
from hpc_rl.node.peers import Coordinator, Peers, coordinate, join
from hpc_rl.node.rank import ENV_NODE_RANK, ENV_NODES
from hpc_rl.node.rank_ends import log_path, node_end
from hpc_rl.node.rendezvous import POLL_S, Rendezvous, WaitMessages, named
from hpc_rl.node.shown_log import ShownLog
from hpc_rl.node.signals import end_when, handle_signals
from hpc_rl.run_dir import ENV_GROUP_DIR
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.software.jit_caches import jit_cache_defaults
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.system.files import open_to_append
from hpc_rl.system.numa import numa_defaults
from hpc_rl.system.processes import adopt_orphans, end, end_descendants, start
from hpc_rl.system.scratch import job_scratch, programs_tmpdir


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    return run_with_others(lambda allocation, rendezvous: _take_part(allocation, rendezvous, options))


def _take_part(allocation: Allocation, rendezvous: Rendezvous, options: argparse.Namespace) -> int:
    rank, processes = allocation.node_rank, options.processes
    adopt_orphans()
    with job_scratch(os.environ, allocation.job_id, rendezvous.attempt_dir, rank) as scratch:
        interface, peers, place = _meet(allocation, rendezvous, options, scratch)
        inherited = repaired(os.environ, options.device, interface, allocation, place["MASTER_ADDR"])
        shown = ShownLog(log_path(rendezvous.attempt_dir, 0, 0), "rank 0")
        program = adapted(options, rendezvous, shown.path)
        environ = program.environment(process_environment(inherited, allocation, options, interface, scratch)) | place
        command = torchrun_command(allocation, processes, str(scratch), program.words)
        watched = WatchedNode(rendezvous.attempt_dir, rendezvous.nodes, rank, scratch / HEARTBEATS, options.device)
        with open_to_append(rendezvous.log(rank)) as log:
            asked_to_end = handle_signals(rendezvous)
            child = start(command, environ, log)
            try:
                end_when(asked_to_end, child)
                with watching(watched, options.hang_timeout, options.adapter == GENERIC.name) as hangs:
                    _supervise(child, peers, (shown, program) if rank == 0 else None, options.start_timeout, hangs)
                was_asked = asked_to_end.is_set() or child.poll() is None
            except UserError:
                if rank == 0:
                    shown.show_rest()
                raise
            finally:
                end(child)
                end_descendants()
    if hangs.concluded():
        own = End(rank, RunError.exit_code)  # the reason has been printed
    elif program.has_saved:
        own = End(rank, EXIT_STOPPED)
    else:
        ranks = range(rank * processes, (rank + 1) * processes)
        own = node_end(rendezvous.attempt_dir, allocation.node, rank, ranks, child.returncode, was_asked)
        if rank == 0 and program.exit_code(own.exit_code) == EXIT_STOPPED:
            own = End(rank, EXIT_STOPPED)
    code = settle(peers, own, asked_to_end, shown.end if rank == 0 else print_cause)
    leave(peers, asked_to_end)
    return code


def process_environment(
    environ: Mapping[str, str], allocation: Allocation, options: argparse.Namespace, interface: str, scratch: Path
) -> dict[str, str]:
    """Return the environment of the ranks. Variables that the user exported take precedence; see programs_tmpdir.

    Args:
        scratch: folder on the node's own disk, which is removed at the end.
    """
    threads = allocation.threads(options.processes)
    workers = worker_defaults(options.device, interface, options.interface, threads)
    defaults = {**workers, **jit_cache_defaults(environ, scratch), **numa_defaults(environ, options.device)}
    beats = {ENV_HEARTBEATS: str(scratch / HEARTBEATS)}
    return {**defaults, **environ, "TMPDIR": programs_tmpdir(environ, scratch), **beats}


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


def _meet(
    allocation: Allocation, rendezvous: Rendezvous, options: argparse.Namespace, scratch: Path
) -> tuple[str, Peers, dict[str, str]]:
    """Meet the other nodes. Returns the interface of this node, the peers, and variables for the ranks.

    By these variables, ranks find their place and each other: hpc-rl's own programs meet in a private folder.
    MASTER_ADDR and MASTER_PORT are for programs that open a store of torch. They are not on a command line, which
    everyone on the node can read.
    """
    others = [name for name in allocation.nodes if name != allocation.node]
    interface, address = choose_address(options.interface, others[0] if others else None)
    if allocation.is_head:
        peers: Peers = coordinate(rendezvous, address)
        rendezvous.publish(f"{address}:{free_port(address)}:{secrets.token_hex(8)}")
    else:
        peers = join(rendezvous, options.start_timeout)
    host, port, name = rendezvous.await_address(options.start_timeout).split(":")
    # One node needs no shared file system, and no file locks on one.
    folder = rendezvous.attempt_dir if len(allocation.nodes) > 1 else scratch
    return (
        interface,
        peers,
        {
            ENV_NODE_RANK: str(allocation.node_rank),
            ENV_NODES: str(len(allocation.nodes)),
            ENV_GROUP_DIR: str(folder / f".group-{name}"),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        },
    )


def _supervise(
    child: subprocess.Popen[bytes],
    peers: Peers,
    leading: tuple[ShownLog, AdaptedProgram] | None,
    start_timeout: float,
    hangs: HangWatch,
) -> None:
    """Wait until torchrun ends, hangs, or this node has to end it.

    Args:
        leading: on node 0, which shows rank 0's log, ends a program that has saved, and checks that all nodes start.

    Raises:
        UserError: some nodes have not started in time.
    """
    rendezvous, deadline = peers.rendezvous, time.monotonic() + start_timeout
    missing, progress = rendezvous.missing() if leading else [], WaitMessages()
    while child.poll() is None and not peers.must_end and not hangs.found:
        time.sleep(POLL_S)
        peers.poll()
        if leading:
            shown, program = leading
            shown.show()
            if program.must_end() and isinstance(peers, Coordinator):
                peers.ask_to_end()
                return
        missing = missing and rendezvous.missing()
        if missing:
            progress.show(rendezvous.attendance)
        if missing and time.monotonic() > deadline:
            raise UserError(
                f"{named(missing)} did not start within {start_timeout:.0f} s (slurm.start_timeout_s); "
                f"the logs are in {rendezvous.attempt_dir}"
            )


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main())
