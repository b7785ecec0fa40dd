"""Every node of a Ray job but the first: joins the cluster and stays until the end."""

from __future__ import annotations

import time

from hpc_rl.node.ray_cluster.layout import Site
from hpc_rl.node.ray_cluster.ports import RayPorts
from hpc_rl.node.ray_cluster.roll_call import Place
from hpc_rl.node.ray_cluster.watch import POLL_S, JobEnd, Watch

CONNECT_TIMEOUT_S = 10


class Member:
    def __init__(self, watch: Watch, site: Site, dashboard: bool, start_timeout_s: float) -> None:
        self._watch = watch
        self._site = site
        self._dashboard = dashboard
        self._start_timeout_s = start_timeout_s
        self._deadline = time.monotonic() + start_timeout_s
        self._place: Place | None = None

    def run(self) -> int:
        """The job's exit code, once node 0 has told it.

        Raises:
            JobEnd: this node cannot join, node 0 is gone, or something broke here.
        """
        watch, site = self._watch, self._site
        watch.until(lambda: watch.meeting.address() is not None, watch.check, self._deadline, self._unheard)
        gcs_address = watch.meeting.address() or ""
        self._place = place = self._call(gcs_address)
        watch.ray.begin(site.orders(gcs_address, self._dashboard))

        def check() -> None:
            code = place.dismissed()
            if code is not None:
                raise JobEnd(code)
            watch.check()
            if place.lost:
                raise watch.lost(0, place.lost)

        watch.until(watch.ray.is_up, check, self._deadline, self._outside)
        place.say_up()
        watch.until(lambda: place.dismissed() is not None, check)
        return place.dismissed() or 0

    def dismiss(self, _code: int) -> None:
        """Nobody depends on this node."""

    def leave(self) -> None:
        if self._place is not None:
            self._place.close()

    @property
    def _first(self) -> str:
        return self._watch.meeting.nodes[0]

    def _call(self, gcs_address: str) -> Place:
        """Connect to node 0's roll call."""
        host, gcs_port = gcs_address.rsplit(":", 1)
        port = RayPorts.of_gcs(int(gcs_port)).roll_call
        secret = self._site.token.read_bytes()
        while True:
            try:
                return Place(host, port, self._site.allocation.node_rank, secret, CONNECT_TIMEOUT_S)
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise JobEnd(
                        1,
                        f"node {self._watch.node} cannot reach node {self._first} at {host}:{port}: {error.strerror}; "
                        "is there a firewall between them, or another network (slurm.interface)?",
                    ) from error
            self._watch.check()
            time.sleep(POLL_S)

    def _unheard(self) -> str:
        return (
            f"node {self._watch.node} waited {self._start_timeout_s:.0f} s (ray.start_timeout_s) for Ray on "
            f"node {self._first}{self._watch.last_lines(0)}"
        )

    def _outside(self) -> str:
        return (
            f"node {self._watch.node} has not joined Ray after {self._start_timeout_s:.0f} s (ray.start_timeout_s)"
            f"{self._watch.last_lines(self._watch.meeting.node_rank)}"
        )
