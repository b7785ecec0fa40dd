"""Every other node of a Ray job: joins the cluster and stays until the end."""

from __future__ import annotations

import time

from hpc_rl.node.causes import TERMINATED, End, Kind
from hpc_rl.node.ending import print_cause
from hpc_rl.node.peers import Participant
from hpc_rl.node.ray_cluster.layout import NodeLayout
from hpc_rl.node.ray_cluster.watch import Watch

LAST_LOOK_S = 0.5
"""How long a node looks for a failure of its own before it ends: Ray's processes report it with a delay."""


class Member:
    """The part of a node other than node 0 in the job."""

    def __init__(
        self, watch: Watch, peers: Participant, layout: NodeLayout, dashboard: bool, start_timeout_s: float
    ) -> None:
        self._watch = watch
        self._peers = peers
        self._layout = layout
        self._dashboard = dashboard
        self._start_timeout_s = start_timeout_s
        self._deadline = time.monotonic() + start_timeout_s

    def run(self) -> End:
        """Take part in the job, and return this node's end when node 0 ends the job or is lost.

        Raises:
            JobEnd: this node cannot join, or something fails here.
        """
        watch, peers, rendezvous = self._watch, self._peers, self._watch.rendezvous

        def must_end() -> bool:
            watch.check()
            return peers.must_end

        watch.until(lambda: must_end() or rendezvous.address() is not None, _nothing, self._deadline, self._no_address)
        gcs_address = rendezvous.address()
        if gcs_address is not None:
            watch.ray.begin(self._layout.start_options(gcs_address, self._dashboard))
            watch.until(lambda: must_end() or watch.ray.is_up(), _nothing, self._deadline, self._not_joined)
        if not peers.must_end:
            peers.report_up()
            watch.until(must_end, _nothing)
        settled = time.monotonic() + LAST_LOOK_S
        watch.until(lambda: time.monotonic() > settled, watch.check)
        lost = End(rendezvous.node_rank, TERMINATED, Kind.TERMINATED)
        return lost if peers.loss else End(rendezvous.node_rank, 0)

    def show_end(self, cause: End | None) -> None:
        """Print the cause, if this node has to do it."""
        print_cause(cause)

    def end(self) -> None:
        """Do nothing: only node 0 has a driver."""

    def _no_address(self) -> str:
        first = self._watch.rendezvous.nodes[0]
        return (
            f"node {self._watch.rendezvous.node} waited {self._start_timeout_s:.0f} s (ray.start_timeout_s) for Ray on "
            f"node {first}{self._watch.last_lines(0)}"
        )

    def _not_joined(self) -> str:
        return (
            f"node {self._watch.rendezvous.node} has not joined Ray after {self._start_timeout_s:.0f} s "
            f"(ray.start_timeout_s){self._watch.last_lines(self._watch.rendezvous.node_rank)}"
        )


def _nothing() -> None:
    """Check nothing: the condition of the wait does."""
