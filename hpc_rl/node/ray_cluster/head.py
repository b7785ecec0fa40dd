"""Node 0 of a Ray job: waits for the other nodes, runs the driver and ends the job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from hpc_rl.formats.counted import counted
from hpc_rl.node.adapted import AdaptedProgram
from hpc_rl.node.causes import TERMINATED, End, Kind
from hpc_rl.node.entry import print_error
from hpc_rl.node.peers import Coordinator
from hpc_rl.node.ray_cluster.environment import driver_environment
from hpc_rl.node.ray_cluster.layout import NodeLayout
from hpc_rl.node.ray_cluster.lender_turns import LenderTurns
from hpc_rl.node.ray_cluster.watch import JobEnd, Watch
from hpc_rl.node.rendezvous import WaitMessages
from hpc_rl.node.shown_log import ShownLog
from hpc_rl.node.signals import time_left
from hpc_rl.software.ray_token import make_token
from hpc_rl.system.deaths import meaning_of, ran_out_of_memory
from hpc_rl.system.files import open_to_append
from hpc_rl.system.processes import end, shell_code, start

SETTLE_S = 1.0
"""How long node 0 looks for a failure of Ray before it takes that of the driver for the cause."""
DRIVER_GRACE_S = 2.0
TIMELINE_TIMEOUT_S = 60
DRIVER_LOG = "node0-driver.log"
DRIVER = "the driver"
"""Its name in messages."""


@dataclass(frozen=True)
class Driver:
    """The user's program and its settings."""

    program: AdaptedProgram
    environ: dict[str, str]
    """Variables that it shares with Ray's own processes."""
    timeline: Path | None
    """File for Ray's timeline, or None for no timeline."""
    dashboard: bool


class Head:
    """The part of node 0 in the job."""

    def __init__(
        self, watch: Watch, peers: Coordinator, layout: NodeLayout, driver: Driver, start_timeout_s: float
    ) -> None:
        self._watch = watch
        self._peers = peers
        self._layout = layout
        self._driver = driver
        self._began = time.monotonic()
        self._start_timeout_s = start_timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._shown = ShownLog(watch.rendezvous.attempt_dir / DRIVER_LOG, DRIVER)
        self._lenders = LenderTurns(watch.rendezvous.attempt_dir.parent)
        make_token(layout.token)

    def run(self) -> End:
        """Wait for the nodes, run the driver and return its end.

        Raises:
            JobEnd: a node does not start in time, or something fails.
        """
        gcs_address = f"{self._layout.address}:{self._layout.ports.gcs}"
        self._watch.ray.begin(self._layout.start_options(gcs_address, self._driver.dashboard))
        self._gather(gcs_address)
        end = self._run_driver(gcs_address)
        if self._driver.timeline is not None:
            with contextlib.suppress(JobEnd):  # the run has its outcome
                self._write_timeline(self._driver.timeline)
        return end

    def show_end(self, cause: End | None) -> None:
        """Print the cause of the job's end and the rest of the driver's log."""
        self._end_driver()
        self._shown.end(cause)

    def end(self) -> None:
        """End what belongs to the run and still runs or waits."""
        self._end_driver()
        self._lenders.end(time_left(self._watch.rendezvous.attempt_dir))

    def _end_driver(self) -> None:
        if self._child is not None:
            end(self._child, DRIVER_GRACE_S)
        self._layout.token.unlink(missing_ok=True)

    def _gather(self, gcs_address: str) -> None:
        nodes = self._watch.rendezvous.nodes
        everyone = set(range(len(nodes)))
        deadline, progress = self._began + self._start_timeout_s, WaitMessages()

        def check() -> None:
            self._check()
            progress.show(self._progress)

        self._watch.until(self._watch.ray.is_up, check, deadline, self._not_up)
        self._watch.rendezvous.publish(gcs_address)
        self._watch.until(lambda: self._peers.up == everyone, check, deadline, self._not_up)
        up_s = time.monotonic() - self._began
        print(f"hpc-rl: Ray is up on {counted(len(nodes), 'node')} after {up_s:.1f} s", flush=True)
        if self._driver.dashboard:
            print(f"hpc-rl: {self._dashboard_instructions()}", flush=True)

    def _run_driver(self, gcs_address: str) -> End:
        environ = driver_environment(self._driver.environ, gcs_address, Path(sys.executable))
        with open_to_append(self._shown.path) as log:
            try:
                self._child = child = start(self._driver.program.words, environ, log)
            except OSError as error:
                command = self._driver.program.words[0]
                raise JobEnd(
                    EXIT_BAD_INPUT,
                    f"program {command} cannot be started on node {self._watch.rendezvous.node}: {error.strerror}",
                ) from error
        program = self._driver.program
        self._watch.until(lambda: child.poll() is not None or program.must_end(), self._check_with_lenders)
        code = EXIT_STOPPED if program.has_saved else program.exit_code(shell_code(child.returncode))
        if code in (0, EXIT_BAD_INPUT, EXIT_STOPPED):
            return End(0, code, process=DRIVER)
        settled = time.monotonic() + SETTLE_S
        self._watch.until(lambda: time.monotonic() > settled, self._check)
        was_killed = child.returncode < 0  # otherwise its own message says what the code means
        meaning = meaning_of(code, ran_out_of_memory(os.environ), "request more --mem") if was_killed else ""
        text = f"{DRIVER} failed with exit code {code}{meaning}; its log is {self._shown.path}"
        return End(0, code, Kind.DEPENDENT, text, DRIVER)

    def _write_timeline(self, path: Path) -> None:
        ray, deadline = self._watch.ray, time.monotonic() + TIMELINE_TIMEOUT_S
        ray.ask_timeline(path.absolute())
        self._watch.until(lambda: ray.timeline_answer() is not None or time.monotonic() > deadline, self._watch.check)
        problem = ray.timeline_answer()
        if problem != "":
            print_error(f"the timeline was not written: {problem or f'Ray took longer than {TIMELINE_TIMEOUT_S} s'}")

    def _check(self) -> None:
        self._watch.check()
        if self._peers.must_end:
            raise JobEnd(TERMINATED, kind=Kind.TERMINATED)
        self._shown.show()

    def _check_with_lenders(self) -> None:
        self._check()
        self._lenders.poll()

    def _progress(self) -> str:
        rendezvous, up = self._watch.rendezvous, len(self._peers.up)
        if rendezvous.missing():
            return rendezvous.attendance()
        return f"Ray: {up} of {len(rendezvous.nodes)} nodes have joined"

    def _not_up(self) -> str:
        nodes = self._watch.rendezvous.nodes
        absent = set(self._watch.rendezvous.missing())
        lines = [f"Ray is not up after {self._start_timeout_s:.0f} s (ray.start_timeout_s)"]
        for rank, node in enumerate(nodes):
            if node in absent:
                lines.append(f"node {node} has not started")
            elif rank not in self._peers.seen:
                lines.append(f"node {node} has started, but has not connected to node {nodes[0]}")
            elif rank not in self._peers.up or not self._watch.ray.is_up():
                lines.append(f"node {node} has not joined{self._watch.last_lines(rank)}")
        return "\nhpc-rl: ".join(lines)

    def _dashboard_instructions(self) -> str:
        port, login = self._layout.ports.dashboard, os.environ.get("SLURM_SUBMIT_HOST")
        tunnel = f"ssh -N -L {port}:127.0.0.1:{port} -J {login} {self._watch.rendezvous.node}, then " if login else ""
        return f"Ray's dashboard: {tunnel}http://127.0.0.1:{port}; the token is in {self._layout.token}"
