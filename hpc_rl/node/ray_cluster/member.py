"""Every other node of a Ray job: joins the cluster and stays until the end."""

from __future__ import annotations

import time

from hpc_rl.node.ray_cluster.layout import NodeLayout
from hpc_rl.node.ray_cluster.ports import roll_call_port
from hpc_rl.node.ray_cluster.roll_call import Caller
from hpc_rl.node.ray_cluster.watch import POLL_S, JobEnd, Watch

CONNECT_TIMEOUT_S = 10


class Member:
    """The part of a node other than node 0 in the job."""

    def __init__(self, watch: Watch, layout: NodeLayout, dashboard: bool, start_timeout_s: float) -> None:
        self._watch = watch
        self._layout = layout
        self._dashboard = dashboard
        self._start_timeout_s = start_timeout_s
        self._deadline = time.monotonic() + start_timeout_s
        self._caller: Caller | None = None

    def run(self) -> int:
        """Take part in the job and return its exit code.

        Raises:
            JobEnd: this node cannot join, node 0 is lost, or something fails here.
        """
        watch = self._watch
        watch.until(lambda: watch.meeting.address() is not None, watch.check, self._deadline, self._no_address)
        gcs_address = watch.meeting.address() or ""
        self._caller = caller = self._call(gcs_address)
        watch.ray.begin(self._layout.start_options(gcs_address, self._dashboard))

        def check() -> None:
            code = caller.dismissed()
            if code is not None:
                raise JobEnd(code)
            watch.check()
            if caller.lost:
                raise watch.lost(0, caller.lost)

        watch.until(watch.ray.is_up, check, self._deadline, self._not_joined)
        caller.report_up()
        watch.until(lambda: caller.dismissed() is not None, check)
        return caller.dismissed() or 0

    def dismiss(self, _code: int) -> None:
        """Do nothing: no other node depends on this one."""

    def leave(self) -> None:
        """Close the connection to node 0."""
        if self._caller is not None:
            self._caller.close()

    @property
    def _first(self) -> str:
        return self._watch.meeting.nodes[0]

    def _call(self, gcs_address: str) -> Caller:
        """Connect to node 0's roll call, until the deadline."""
        host, gcs_port = gcs_address.rsplit(":", 1)
        port = roll_call_port(int(gcs_port))
        secret = self._layout.token.read_bytes()
        while True:
            try:
                return Caller(host, port, self._layout.allocation.node_rank, secret, CONNECT_TIMEOUT_S)
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise JobEnd(
                        1,
                        f"node {self._watch.node} cannot reach node {self._first} at {host}:{port}: {error.strerror}; "
                        "check for a firewall between them, or set slurm.interface to another network",
                    ) from error
            self._watch.check()
            time.sleep(POLL_S)

    def _no_address(self) -> str:
        return (
            f"node {self._watch.node} waited {self._start_timeout_s:.0f} s (ray.start_timeout_s) for Ray on "
            f"node {self._first}{self._watch.last_lines(0)}"
        )

    def _not_joined(self) -> str:
        return (
            f"node {self._watch.node} has not joined Ray after {self._start_timeout_s:.0f} s (ray.start_timeout_s)"
            f"{self._watch.last_lines(self._watch.meeting.node_rank)}"
        )
