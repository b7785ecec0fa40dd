"""Node 0 of a Ray job: waits for the others, runs the driver, and ends the job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from hpc_rl.host.files import Follower
from hpc_rl.host.processes import end, shell_code, start
from hpc_rl.host.ray_token import make_token
from hpc_rl.node.entry import say
from hpc_rl.node.ray_cluster.environment import driver_environment
from hpc_rl.node.ray_cluster.layout import Site
from hpc_rl.node.ray_cluster.roll_call import RollCall
from hpc_rl.node.ray_cluster.watch import CAUSE_S, JobEnd, Watch

LOG_POLL_S = 0.5
"""Between two looks at the driver's log, which lies on a shared file system."""
DRIVER_GRACE_S = 2.0
TIMELINE_TIMEOUT_S = 60
LEAVE_TIMEOUT_S = 20


@dataclass(frozen=True)
class Driver:
    """The user's program, and what it is given."""

    program: Sequence[str]
    environ: dict[str, str]
    """What it shares with Ray's own processes."""
    timeline: Path | None
    """Where Ray's timeline goes at the end."""
    dashboard: bool


class Head:
    def __init__(self, watch: Watch, site: Site, driver: Driver, start_timeout_s: float) -> None:
        self._watch = watch
        self._site = site
        self._driver = driver
        self._began = time.monotonic()
        self._start_timeout_s = start_timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._shown = ShownLog(watch.meeting.attempt_dir / "node0-driver.log")
        secret = make_token(site.token)
        self._roll = RollCall(site.address, site.ports.roll_call, len(watch.meeting.nodes), secret)

    def run(self) -> int:
        """Gather the nodes, run the driver; its exit code.

        Raises:
            JobEnd: a node does not come, or something broke.
        """
        gcs_address = f"{self._site.address}:{self._site.ports.gcs}"
        self._watch.ray.begin(self._site.orders(gcs_address, self._driver.dashboard))
        self._gather(gcs_address)
        code = self._run_driver(gcs_address)
        if self._driver.timeline is not None:
            self._write_timeline(self._driver.timeline)
        return code

    def dismiss(self, code: int) -> None:
        """Tell the other nodes that the job ends, and end the driver where it runs."""
        self._roll.dismiss(code)
        if self._child is not None:
            end(self._child, DRIVER_GRACE_S)
        self._shown.show_rest()

    def leave(self) -> None:
        """The other nodes clean up at the same time; one that is gone or stuck does not hold up the job's end."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while not self._roll.all_left and not self._watch.asked_to_end.is_set() and time.monotonic() < deadline:
            self._roll.poll()
            time.sleep(0.05)
        self._roll.close()
        self._site.token.unlink(missing_ok=True)
        if not all(loss.machine_answers for loss in self._roll.lost.values()):
            # For the job script: srun would wait for that machine.
            (self._watch.meeting.attempt_dir / ".lost").touch()

    def _gather(self, gcs_address: str) -> None:
        nodes = self._watch.meeting.nodes
        everyone = set(range(len(nodes)))
        deadline = self._began + self._start_timeout_s
        self._watch.until(self._watch.ray.is_up, self._check, deadline, self._late)
        self._watch.meeting.publish(gcs_address)
        self._watch.until(lambda: self._roll.up == everyone, self._check, deadline, self._late)
        count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        print(f"hpc-rl: Ray is up on {count} after {time.monotonic() - self._began:.1f} s", flush=True)
        if self._driver.dashboard:
            print(f"hpc-rl: {self._how_to_see_the_dashboard()}", flush=True)

    def _run_driver(self, gcs_address: str) -> int:
        environ = driver_environment(self._driver.environ, gcs_address, Path(sys.executable))
        with self._shown.path.open("ab") as log:
            try:
                self._child = child = start(self._driver.program, environ, log)
            except OSError as error:
                program = self._driver.program[0]
                raise JobEnd(
                    EXIT_BAD_INPUT, f"program {program} cannot be started on node {self._watch.node}: {error.strerror}"
                ) from error
        self._watch.until(lambda: child.poll() is not None, self._check)
        code = shell_code(child.returncode)
        if code:
            # A driver that lost a node may end before anybody has said which.
            settled = time.monotonic() + CAUSE_S
            self._watch.until(lambda: time.monotonic() > settled, self._check)
        self._shown.show_rest()
        if code not in (0, EXIT_BAD_INPUT, EXIT_STOPPED):
            killed = " (killed, usually for lack of memory: ask for more --mem)" if code == 128 + 9 else ""
            say(f"the driver failed with exit code {code}{killed}; its log is {self._shown.path}")
        return code

    def _write_timeline(self, path: Path) -> None:
        ray, deadline = self._watch.ray, time.monotonic() + TIMELINE_TIMEOUT_S
        ray.ask_timeline(path.absolute())
        self._watch.until(lambda: ray.timeline_answer() is not None or time.monotonic() > deadline, self._watch.check)
        problem = ray.timeline_answer()
        if problem != "":
            say(f"no timeline was written: {problem or f'Ray took over {TIMELINE_TIMEOUT_S} s'}")

    def _check(self) -> None:
        self._watch.check()
        self._roll.poll()
        for rank, loss in self._roll.lost.items():
            raise self._watch.lost(rank, loss)
        self._shown.show()

    def _late(self) -> str:
        nodes = self._watch.meeting.nodes
        absent = set(self._watch.meeting.missing())
        lines = [f"Ray is not up after {self._start_timeout_s:.0f} s (ray.start_timeout_s)"]
        for rank, node in enumerate(nodes):
            if node in absent:
                lines.append(f"node {node} has not started")
            elif rank not in self._roll.seen:
                lines.append(f"node {node} has started, and has not called node {nodes[0]}")
            elif rank not in self._roll.up or not self._watch.ray.is_up():
                lines.append(f"node {node} has not joined{self._watch.last_lines(rank)}")
        return "\nhpc-rl: ".join(lines)

    def _how_to_see_the_dashboard(self) -> str:
        port, login = self._site.ports.dashboard, os.environ.get("SLURM_SUBMIT_HOST")
        tunnel = f"ssh -N -L {port}:127.0.0.1:{port} -J {login} {self._watch.node}, then " if login else ""
        return f"Ray's dashboard: {tunnel}http://127.0.0.1:{port}; it asks for the token in {self._site.token}"


class ShownLog:
    """A log that is shown on standard output while it grows, one look behind: what broke the driver is told first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = Follower(path)
        self._held = ""
        self._next_look = 0.0

    def show(self) -> None:
        if time.monotonic() >= self._next_look:
            print(self._held, end="", flush=True)
            self._held = self._log.new_text()
            self._next_look = time.monotonic() + LOG_POLL_S

    def show_rest(self) -> None:
        print(self._held + self._log.new_text(), end="", flush=True)
        self._held = ""
