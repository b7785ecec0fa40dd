"""One node of a Ray job: from a Slurm task to a Ray node, and on the first one to the driver.

    srun --ntasks-per-node=1 python -m hpc_rl.node.ray_cluster.node --processes 8 -- python my_driver.py ...

The job script starts this once on each node. Node 0 starts the head, waits for the others, and runs the driver, whose
exit code is the job's; the others join and stay until the end. Whatever breaks ends the job on all nodes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.host.processes import adopt_orphans, end_descendants
from hpc_rl.node.entry import run_entry, say, this_allocation, this_attempt_dir
from hpc_rl.node.meeting import Meeting
from hpc_rl.node.ray_cluster.environment import ray_environment
from hpc_rl.node.ray_cluster.head import Driver, Head
from hpc_rl.node.ray_cluster.layout import Site, prepared_site
from hpc_rl.node.ray_cluster.limits import raise_file_limit
from hpc_rl.node.ray_cluster.logs import copy_logs
from hpc_rl.node.ray_cluster.member import Member
from hpc_rl.node.ray_cluster.processes import RayProcess
from hpc_rl.node.ray_cluster.watch import JobEnd, Watch, catch_termination
from hpc_rl.node.usage_recorder import recording_usage
from hpc_rl.slurm.allocation import Allocation


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if argv is None else argv)
    return run_entry(lambda: run_node(options))


def run_node(options: argparse.Namespace) -> int:
    """Be one node of the job, and leave nothing behind; the exit code for Slurm."""
    allocation, attempt_dir = this_allocation(), this_attempt_dir()
    meeting = Meeting(attempt_dir, allocation.nodes, allocation.node_rank)
    meeting.check_shared()
    meeting.arrive()
    return recording_usage(allocation, attempt_dir, lambda: _from_begin_to_end(allocation, meeting, options))


def _from_begin_to_end(allocation: Allocation, meeting: Meeting, options: argparse.Namespace) -> int:
    asked_to_end = catch_termination()
    adopt_orphans()
    raise_file_limit()
    try:
        with prepared_site(allocation, meeting.attempt_dir, options) as site:
            part, code = _take_part(site, meeting, asked_to_end, options)
        part.leave()
    except UserError as error:
        meeting.fail(error.exit_code)
        raise
    finally:
        # Slurm ends all tasks when the first has failed, and that must not replace this one's exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


def _take_part(
    site: Site, meeting: Meeting, asked_to_end: threading.Event, options: argparse.Namespace
) -> tuple[Head | Member, int]:
    """Run this node's Ray from beginning to end; this node's part in the job, and the job's exit code."""
    environ = site.environment(options.processes, timeline=options.timeline is not None)
    rank, attempt_dir = meeting.node_rank, meeting.attempt_dir
    with (attempt_dir / f"node{rank}.log").open("ab") as log:
        ray = RayProcess(ray_environment(environ), log)
        try:
            watch = Watch(meeting, ray, asked_to_end)
            if site.allocation.is_head:
                driver = Driver(options.program, environ, options.timeline, options.dashboard)
                part: Head | Member = Head(watch, site, driver, options.start_timeout)
            else:
                part = Member(watch, site, options.dashboard, options.start_timeout)
            code = _outcome(part, meeting)
            part.dismiss(code)
        finally:
            ray.end()
            end_descendants()
            copy_logs(site.temp_dir, attempt_dir / "ray" / f"node{rank}")
    return part, code


def _outcome(part: Head | Member, meeting: Meeting) -> int:
    """The job's exit code. What broke is told before anything that follows from it."""
    try:
        return part.run()
    except JobEnd as ended:
        if str(ended):
            say(str(ended))
            meeting.fail(ended.exit_code)
        return ended.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.node.ray_cluster.node", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="training processes of this node, or its GPUs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: Ray gets no GPUs")
    parser.add_argument("--interface", help="network interface between the nodes (default: by the routing table)")
    parser.add_argument("--start-timeout", type=int, default=300, help="seconds in which all nodes must have joined")
    parser.add_argument("--num-cpus", type=int, help="most CPUs that Ray may use on a node")
    parser.add_argument("--object-store-bytes", type=int, help="of shared memory on a node (default: 30 %% of memory)")
    parser.add_argument("--first-port", type=int, help="first port of the block (default: by the job's id)")
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard on node 0's loopback")
    parser.add_argument("--timeline", type=Path, help="file for Ray's timeline, written at the end")
    parser.add_argument("program", nargs="+", help="-- then the driver's command and its arguments")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
