"""Common parts of the node entries: the allocation, the attempt's folder, and the report of errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_rl.adapters.table import ADAPTERS, GENERIC
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.node.network import addresses_of, with_usable_interfaces
from hpc_rl.node.peers import JoinAborted
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.node.usage_recorder import recording_usage
from hpc_rl.run_dir import ENV_ATTEMPT_DIR, read_outcome
from hpc_rl.slurm.allocation import Allocation, read_allocation
from hpc_rl.software.environment import openmp_defaults, tokenizer_defaults
from hpc_rl.software.proxies import proxies, without_proxy_to
from hpc_rl.system.accelerators import DEVICES, collective_defaults, of_one_vendor
from hpc_rl.system.deaths import remember_oom_kills
from hpc_rl.system.disk import refuse_unwritable
from hpc_rl.system.scratch import local_folder


def run_entry(entry: Callable[[], int]) -> int:
    """Run the entry and return its exit code. A `UserError` is printed as one message."""
    try:
        return entry()
    except UserError as error:
        print_error(str(error))
        return error.exit_code


def run_with_others(take_part: Callable[[Allocation, Rendezvous], int]) -> int:
    """Meet the other nodes of the job, take part in it while its use of the node is recorded, and return the exit code.

    Args:
        take_part: does this node's part of the job; returns the exit code for Slurm.
    """

    def entry() -> int:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until training begins, there is nothing to save
        allocation, attempt_dir = this_allocation(), this_attempt_dir()
        remember_oom_kills(os.environ)
        rendezvous = Rendezvous(attempt_dir, allocation.nodes, allocation.node_rank)
        rendezvous.check_shared()
        try:
            refuse_full_disks(allocation, attempt_dir)
            rendezvous.arrive()
            code = recording_usage(allocation, attempt_dir, lambda: take_part(allocation, rendezvous))
            return code_for_srun(code, attempt_dir)
        except JoinAborted as ended:
            return ended.exit_code
        except UserError as error:
            with contextlib.suppress(UserError):  # on a full disk
                rendezvous.fail(error.exit_code)
            raise
        finally:
            # Slurm terminates all tasks after the first that fails or stops. That must not replace this exit code.
            for number in (signal.SIGTERM, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)

    return run_entry(entry)


def code_for_srun(code: int, attempt_dir: Path) -> int:
    """Return the exit code of a node entry: 0 also for a run that has saved and stopped, if `.outcome` says so.

    The job script takes its exit code from there. For other codes than 0, srun prints errors and cancels the step.
    """
    return 0 if code == EXIT_STOPPED and read_outcome(attempt_dir) == EXIT_STOPPED else code


def refuse_full_disks(allocation: Allocation, attempt_dir: Path) -> None:
    """Check that this node can write where the job writes. Without space, Ray's processes end without a reason.

    Raises:
        UserError: it cannot.
    """
    for folder, what in ((attempt_dir, "the run directory"), (local_folder(os.environ), "the temporary folder")):
        refuse_unwritable(folder, f"{what} of node {allocation.node}")


def this_allocation() -> Allocation:
    """Return the allocation of this task.

    Raises:
        UserError: SLURM_* variables are missing or malformed.
    """
    try:
        return read_allocation(os.environ, len(os.sched_getaffinity(0)))
    except ValueError as error:
        raise UserError(str(error)) from error


def this_attempt_dir() -> Path:
    """Return the folder of the current attempt.

    Raises:
        UserError: the job script has not set it.
    """
    if ENV_ATTEMPT_DIR not in os.environ:
        raise UserError(
            f"{ENV_ATTEMPT_DIR} is not set: start this module with a script that hpc-rl rendered, "
            "or with hpc-rl submit --local"
        )
    return Path(os.environ[ENV_ATTEMPT_DIR])


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all node entries share."""
    parser.add_argument("--processes", type=int, required=True, help="processes, one for each GPU, of this node")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="torch's name of their devices")
    parser.add_argument(
        "--hang-timeout", type=float, default=0, help="seconds that a process may be silent (default: no limit)"
    )
    parser.add_argument(
        "--adapter",
        choices=ADAPTERS,
        default=GENERIC.name,
        help="row of ADAPTERS for the program (default: %(default)s)",
    )
    parser.add_argument("--warning", type=float, default=0, help="seconds before the end of the walltime to save by")
    parser.add_argument("--interface", help="network interface between the nodes (default: from the routing table)")


def worker_defaults(device: str, interface: str, configured: str | None, threads: int) -> dict[str, str]:
    """Return the environment of training processes. Variables that the user exported take precedence.

    Args:
        device: cuda, npu, xpu or cpu.
        interface: network interface between the nodes. Gloo needs it: it would use the address of the host's name.
        configured: the interface that the user chose, which the devices' library has to use too; or None.
        threads: OpenMP threads of each process.
    """
    return {
        "GLOO_SOCKET_IFNAME": interface,
        **collective_defaults(device, configured),
        **openmp_defaults(threads),
        **tokenizer_defaults(),
    }


def repaired(
    environ: Mapping[str, str], device: str, interface: str, allocation: Allocation, address: str | None = None
) -> dict[str, str]:
    """Return what training processes inherit, without values that cannot work on this node. Each change is printed.

    Slurm, modules and shells set such variables for other programs, nodes and vendors. A proxy is not used between
    nodes.

    Args:
        device: cuda, npu, xpu or cpu.
        interface: network interface between the nodes.
        address: a further address that processes of the job use, besides the names and addresses of the nodes.
    """
    found, on_devices = of_one_vendor(environ, device)
    found, on_interfaces = with_usable_interfaces(found, interface)
    for line in (*on_devices, *on_interfaces):
        print_error(f"node {allocation.node}: {line}")
    if not proxies(found):
        return found
    return without_proxy_to(
        found, [*allocation.nodes, *addresses_of(allocation.nodes), *([address] if address else [])]
    )


def print_error(text: str) -> None:
    """Print a message to standard error, with the prefix of all messages of hpc-rl."""
    print(f"hpc-rl: {text}", file=sys.stderr, flush=True)
