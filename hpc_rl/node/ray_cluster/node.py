"""One node of a Ray job: starts Ray from a Slurm task, and the driver on the first node.

    srun --ntasks-per-node=1 python -m hpc_rl.node.ray_cluster.node --processes 8 -- python my_driver.py ...

The job script starts this once on each node. Node 0 starts the head, waits for the other nodes and runs the driver,
whose exit code is that of the job. The other nodes join and stay until the end. Any failure ends the job on all nodes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_rl.errors import RunError
from hpc_rl.liveness.heartbeat import ENV_HEARTBEATS
from hpc_rl.node.adapted import adapted
from hpc_rl.node.causes import End
from hpc_rl.node.ending import leave, settle
from hpc_rl.node.entry import add_common_options, run_with_others
from hpc_rl.node.hangs.watch import WatchedNode, watching
from hpc_rl.node.peers import Peers, coordinate, join
from hpc_rl.node.ray_cluster.environment import ray_environment
from hpc_rl.node.ray_cluster.head import DRIVER_LOG, Driver, Head
from hpc_rl.node.ray_cluster.layout import NodeLayout, prepared_layout
from hpc_rl.node.ray_cluster.limits import raise_file_limit
from hpc_rl.node.ray_cluster.member import Member
from hpc_rl.node.ray_cluster.processes import RayProcess
from hpc_rl.node.ray_cluster.watch import JobEnd, Watch
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.node.signals import handle_signals
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.system.files import open_to_append
from hpc_rl.system.processes import adopt_orphans, end_descendants

MAX_LOG_FILES = 400
LOG_FILE_BYTES = 1_000_000
"""Longest log that is copied whole. Of a longer one the end is kept."""
_LOG_SUFFIXES = (".log", ".out", ".err", ".txt")
_NODE_LOGS = ("raylet", "gcs_server", "ray_process", "dashboard", "runtime_env", "log_monitor", "monitor")
"""Logs of Ray's own processes, which are copied first. Workers' logs follow, the newest first."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if argv is None else argv)
    return run_with_others(lambda allocation, rendezvous: _run_and_clean_up(allocation, rendezvous, options))


def _run_and_clean_up(allocation: Allocation, rendezvous: Rendezvous, options: argparse.Namespace) -> int:
    asked_to_end = handle_signals(rendezvous)
    adopt_orphans()
    raise_file_limit()
    with prepared_layout(allocation, rendezvous.attempt_dir, options) as layout:
        peers, code = _take_part(layout, rendezvous, asked_to_end, options)
    leave(peers, asked_to_end)
    return code


def _take_part(
    layout: NodeLayout, rendezvous: Rendezvous, asked_to_end: threading.Event, options: argparse.Namespace
) -> tuple[Peers, int]:
    """Run this node's Ray to the end, and return the job's exit code."""
    rank, attempt_dir = rendezvous.node_rank, rendezvous.attempt_dir
    program = adapted(options, rendezvous, attempt_dir / DRIVER_LOG)
    environ = program.environment(layout.environment(options))
    with open_to_append(rendezvous.log(rank)) as log:
        ray = RayProcess(ray_environment(environ), log, options.start_timeout)
        try:
            place = WatchedNode(attempt_dir, rendezvous.nodes, rank, Path(environ[ENV_HEARTBEATS]), options.device)
            with watching(place, options.hang_timeout) as hangs:
                if layout.allocation.is_head:
                    leading = coordinate(rendezvous, layout.address, layout.ports.roll_call)
                    peers: Peers = leading
                    driver = Driver(program, environ, options.timeline, options.dashboard)
                    watch = Watch(peers, ray, asked_to_end, hangs)
                    part: Head | Member = Head(watch, leading, layout, driver, options.start_timeout)
                else:
                    peers = participant = join(rendezvous, options.start_timeout, asked_to_end)
                    watch = Watch(peers, ray, asked_to_end, hangs)
                    part = Member(watch, participant, layout, options.dashboard, options.start_timeout)
                try:
                    own = part.run()
                except JobEnd as ended:
                    own = ended.of(rank)
            if hangs.concluded():
                own = End(rank, RunError.exit_code)  # the reason has been printed
            code = settle(peers, own, asked_to_end, part.show_end, linger_s=0)
            part.end()
        finally:
            ray.end()
            end_descendants()
            copy_logs(layout.temp_dir, attempt_dir / "ray" / f"node{rank}")
    return peers, code


def copy_logs(temp_dir: Path, target: Path) -> None:
    """Copy the text of Ray's session logs, which are on the node's own disk and are removed with it."""
    for log in list(_ordered_logs(temp_dir))[:MAX_LOG_FILES]:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy_end(log, target / log.name)


def _ordered_logs(temp_dir: Path) -> Iterator[Path]:
    logs = [
        (path, path.stat())
        for path in temp_dir.glob("session_2*/logs/*")
        if path.suffix in _LOG_SUFFIXES and path.is_file() and not path.is_symlink()
    ]
    full = [(path, stat.st_mtime) for path, stat in logs if stat.st_size]
    first = [path for path, _ in full if path.name.startswith(_NODE_LOGS)]
    others = sorted((mtime, path) for path, mtime in full if not path.name.startswith(_NODE_LOGS))
    yield from sorted(first)
    yield from (path for _, path in reversed(others))


def _copy_end(source: Path, target: Path) -> None:
    with source.open("rb") as log, target.open("wb") as copy:
        skipped = source.stat().st_size - LOG_FILE_BYTES
        if skipped > 0:
            log.seek(skipped)
            copy.write(f"[the first {skipped} bytes are left out]\n".encode())
        shutil.copyfileobj(log, copy)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.node.ray_cluster.node", description=__doc__)
    add_common_options(parser)
    add_ray_options(parser)
    parser.add_argument("--joinable", action="store_true", help="listen for nodes of other jobs, also on one node")
    parser.add_argument("program", nargs="+", help="-- then the driver's command and its arguments")
    return parser.parse_args(argv)


def add_ray_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Ray, which are those of _ray_options in `hpc_rl.submission.script.render`."""
    parser.add_argument("--start-timeout", type=int, default=300, help="seconds within which all nodes must join")
    parser.add_argument("--num-cpus", type=int, help="largest number of CPUs that Ray may use on a node")
    parser.add_argument("--object-store-bytes", type=int, help="object store of a node (default: 30 %% of its memory)")
    parser.add_argument("--first-port", type=int, help="first port that Ray uses (default: derived from the job id)")
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard on node 0's loopback")
    parser.add_argument("--timeline", type=Path, help="file for Ray's timeline, written at the end")


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main())
