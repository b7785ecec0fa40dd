"""One node that a job lends to a run of another job: it joins the run's Ray, and leaves when one of the two ends.

    srun --ntasks-per-node=1 python -m hpc_rl.node.ray_cluster.lender --processes 8 -- runs/math

The job script starts this once on each node. The nodes know nothing of each other, and the run does not depend on them.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.errors import EXIT_STOPPED, RunError, UserError
from hpc_rl.formats.offer import LEAVING, LENT, Offer, read_offer, refusal_file, versions_of
from hpc_rl.formats.usage import usage_file
from hpc_rl.liveness.heartbeat import HEARTBEATS
from hpc_rl.node.entry import add_common_options, run_with_others
from hpc_rl.node.ray_cluster.environment import ray_environment
from hpc_rl.node.ray_cluster.layout import NodeLayout, prepared_layout
from hpc_rl.node.ray_cluster.limits import raise_file_limit
from hpc_rl.node.ray_cluster.node import add_ray_options, copy_logs
from hpc_rl.node.ray_cluster.processes import Failure, RayProcess
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.node.signals import handle_signals
from hpc_rl.run_dir import RunDir, outcome_file
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.slurm.states import end_of
from hpc_rl.software.ray_token import TOKEN, digest_of
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.system.files import open_to_append, write_atomically
from hpc_rl.system.processes import adopt_orphans, descendants, end_descendants

LOOK_S = 1.0
"""Interval between looks at the run's files."""
REACH_S = 20.0
"""Time in which the run's first node has to answer."""
MOST_FAILURES = 3
"""Failures of a node's Ray in one attempt of the run, after which the node is released."""
LEAVE_WAIT_S = 10.0
"""Time in which the run takes back the requests of a node that leaves, if others continue them."""
_ENTRY_PROGRAM = "python -m hpc_rl.node.ray_cluster.lender"


@dataclass(frozen=True)
class Host:
    """The attempt of a run that takes lent nodes."""

    attempt_dir: Path
    offer: Offer

    @property
    def token(self) -> Path:
        return self.attempt_dir / TOKEN

    def is_open(self) -> bool:
        """Return whether the attempt has not ended. Its node 0 or its job script removes the token."""
        return self.token.exists() and not outcome_file(self.attempt_dir).exists()

    def last_sign(self) -> float:
        """Return when the first node last recorded what it uses, which it does at least once a minute."""
        try:
            return usage_file(self.attempt_dir, 0).stat().st_mtime
        except OSError:
            return 0.0

    def is_reached(self) -> bool:
        """Return whether Ray of the run's first node accepts connections from this node."""
        address, _, port = self.offer.gcs_address.rpartition(":")
        try:
            socket.create_connection((address, int(port)), REACH_S).close()
        except OSError:
            return False
        return True


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if argv is None else argv)
    return run_with_others(lambda allocation, rendezvous: _lend(allocation, rendezvous, options))


def _lend(allocation: Allocation, rendezvous: Rendezvous, options: argparse.Namespace) -> int:
    """Lend this node until the run, or this job, ends; return the exit code."""
    asked, own_stop = handle_signals(rendezvous), RunDir(rendezvous.attempt_dir.parent).stop

    def must_leave() -> bool:
        return asked.is_set() or own_stop.exists()

    adopt_orphans()
    raise_file_limit()
    run, node = RunDir(Path(options.run).absolute()), allocation.node
    if not run.path.is_dir():
        raise UserError(
            f"node {node} does not see the directory of run {run.name}, {run.path}: choose a partition whose nodes "
            "share its file system"
        )
    failures: Counter[Path] = Counter()
    """By attempt of the run: how often this node's Ray has failed in it."""
    earlier = list(descendants(os.getpid()))  # such as the one that records what this job uses
    with prepared_layout(allocation, rendezvous.attempt_dir, options) as layout:
        while host := _await_host(run, node, options.wait, must_leave, lost=failures):
            _refuse(host, run, node, options.engine_package)
            try:
                failure = _join(replace(layout, token=host.token), host, run, rendezvous, options, must_leave)
            finally:
                end_descendants(kept=earlier)  # what is left of Ray has the ports of the next stay
            if failure is None:
                continue
            print(f"hpc-rl: node {node}: {failure.reason}", flush=True)
            failures[host.attempt_dir] += 1
            if failures[host.attempt_dir] >= MOST_FAILURES and host.is_reached():
                raise RunError(f"Ray of node {node} has failed {MOST_FAILURES} times: see {rendezvous.attempt_dir}")
    if not must_leave():
        return 0
    if allocation.is_head:
        write_atomically(outcome_file(rendezvous.attempt_dir), str(EXIT_STOPPED))
    return EXIT_STOPPED  # the job script queues the job again, if slurm.requeue says so


def _await_host(
    run: RunDir, node: str, wait_s: float, must_leave: Callable[[], bool], lost: Mapping[Path, int]
) -> Host | None:
    """Wait for an attempt of the run that takes nodes; None if the run has ended, or this job has to.

    Args:
        lost: the attempts in which this node's Ray has failed.

    Raises:
        UserError: the run's first node is not reached, although it lives. If it has died, nobody closes the attempt.
    """
    deadline, is_said, signs = time.monotonic() + wait_s, False, dict[Path, float]()
    while not must_leave():
        newest = run.attempts()[-1:]
        offer = read_offer(newest[0]) if newest else None
        host = Host(newest[0], offer) if offer else None
        if host and host.is_open():
            sign = signs.setdefault(host.attempt_dir, host.last_sign())
            if host.is_reached():
                return host
            if host.last_sign() != sign and host.attempt_dir not in lost and host.is_open():
                raise UserError(
                    f"node {node} does not reach the first node of run {run.name} ({host.offer.gcs_address}): choose a "
                    "partition whose nodes have a route to it, or set slurm.interface in both jobs"
                )
        if ended := end_of(run):
            print(f"hpc-rl: node {node} leaves: run {run.name} has ended ({ended})", flush=True)
            return None
        if time.monotonic() > deadline:
            state = run.read_status().get("state")
            print(
                f"hpc-rl: node {node} leaves: run {run.name} took no nodes within {wait_s:.0f} s (lend.wait_s); it "
                f"{f'has the state {state}' if state else 'has not started'}. Lend again when it trains",
                flush=True,
            )
            return None
        if not is_said:
            print(f"hpc-rl: node {node} waits for run {run.name}, at most {wait_s:.0f} s (lend.wait_s)", flush=True)
            is_said = True
        time.sleep(LOOK_S)
    return None


def _refuse(host: Host, run: RunDir, node: str, package: str | None) -> None:
    """Raise UserError if engines of the run cannot work on this node."""
    if other := host.offer.other_versions(versions_of(package)):
        raise UserError(
            f"node {node} cannot join run {run.name}, because versions differ ({'; '.join(other)}): lend with "
            "the Python or the image of the run (slurm.python, container.image)"
        )
    if (model := Path(host.offer.model)).is_absolute() and not model.exists():
        raise UserError(
            f"node {node} does not find the model of run {run.name}, {model}: put it on a file system that the nodes "
            "of both jobs share, or choose another partition"
        )
    if digest_of(host.token) != host.offer.token and host.is_open():
        raise UserError(
            f"node {node} cannot join run {run.name}: its token {host.token} has been replaced since the run began. "
            f"To continue with a new one: hpc-rl stop {run.path}, then submit the run again"
        )


def _join(
    layout: NodeLayout,
    host: Host,
    run: RunDir,
    rendezvous: Rendezvous,
    options: argparse.Namespace,
    must_leave: Callable[[], bool],
) -> Failure | None:
    """Join the run's Ray, and stay until the run or this job ends. Return why this node's Ray has failed, if it has.

    Raises:
        UserError: no engine starts on this node.
    """
    node, job = layout.allocation.node, layout.allocation.job_id
    start = replace(
        layout.start_options(host.offer.gcs_address, dashboard=False),
        head=False,
        name=f"lent.{job}.{rendezvous.node_rank}.{node}",
        num_cpus=0,
        lent=options.processes,
        lent_resource=options.resource,
    )
    (layout.scratch / HEARTBEATS).mkdir(mode=0o700, exist_ok=True)  # nobody watches them: the run's driver does
    leaving, refusal = layout.scratch / "leaving", refusal_file(host.attempt_dir, start.name)
    with open_to_append(rendezvous.log(rendezvous.node_rank)) as log:
        environ = ray_environment(layout.environment(options))
        if host.offer.continues:
            environ[LEAVING] = str(leaving)
        ray = RayProcess(environ, log, options.start_timeout)
        try:
            ray.begin(start)
            is_up = False
            while host.is_open() and not must_leave():
                if not is_up and ray.is_up():
                    is_up = True
                    print(f"hpc-rl: node {node} has joined run {run.name}", flush=True)
                if failure := ray.failure():
                    return failure
                if refusal.exists():
                    raise UserError(f"run {run.name} releases node {node}: {refusal.read_text()}")
                time.sleep(LOOK_S)
            if host.offer.continues and host.is_open():
                leaving.touch()
                _wait_for_engines()
            return None
        finally:
            ray.end()
            copy_logs(layout.temp_dir, rendezvous.attempt_dir / "ray" / f"node{rendezvous.node_rank}")


def _wait_for_engines() -> None:
    """Wait until the run, which sees that this node leaves, has ended its engines."""
    deadline = time.monotonic() + LEAVE_WAIT_S
    while time.monotonic() < deadline and any(map(_is_engine, descendants(os.getpid()))):
        time.sleep(0.1)


def _is_engine(pid: int) -> bool:
    """Return whether a process is one of Ray's with an engine, by the name that Ray gives it."""
    try:
        return b"EngineProcess" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_ENTRY_PROGRAM, description=__doc__)
    add_common_options(parser)
    add_ray_options(parser)
    parser.add_argument("--wait", type=float, default=600, help="seconds to wait for a run that takes no nodes now")
    parser.add_argument("--engine-package", help="package of the run's engine, whose version has to be the same")
    parser.add_argument("--resource", default=LENT, help="Ray's resource of such nodes (default: %(default)s)")
    parser.add_argument("run", help="-- then the run directory")
    return parser.parse_args(argv, argparse.Namespace(joinable=True))


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main())
