"""The Ray processes of one node: what `ray start --block` does, without what a job has no use for.

`ray start --head` also starts an autoscaler, a client server and a dashboard, and waits for the last: half of its time,
and three more doors. This leaves them out. It is a process of its own, so that the entry that watches it needs no Ray.

Orders come as lines on standard input, answers go as lines to standard output; the rest of the output is the log's.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from hpc_rl.host.processes import die_with_parent

POLL_S = 0.1
UP = "up"
ENDED = "ended"
TIMELINE = "timeline"


@dataclass(frozen=True)
class Orders:
    """One Ray node. Also the first order, as JSON."""

    head: bool
    gcs_address: str
    """`host:port`; on the head where it shall listen."""
    address: str
    """IPv4 address of this node."""
    name: str
    temp_dir: str
    num_cpus: int
    num_gpus: int
    memory: int
    object_store_memory: int
    services: dict[str, int]
    """Ports of the node's services."""
    worker_ports: tuple[int, int]
    dashboard: bool
    """Whether the job has a dashboard, to which every node contributes."""
    dashboard_port: int
    """On the loopback of the head."""

    def as_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def main() -> int:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _leave)
    # Before the orders, which come when node 0 is up: importing Ray takes as long as starting it.
    import ray._private.node  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        return 1
    node = start_node(Orders(**json.loads(line)), answers)
    try:
        answers.write(f"{UP}\n")
        return _serve(node, answers)
    finally:
        # A second signal must not end this half-way.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.kill_all_processes(check_alive=False, allow_graceful=True)


def start_node(orders: Orders, answers: TextIO) -> Any:
    """Start the processes and wait until the cluster knows them."""
    if not orders.dashboard:
        # Without this module Ray starts its agents as after a plain `pip install ray`: quicker, and with no open ports.
        sys.modules["ray.dashboard.optional_deps"] = None  # type: ignore[assignment]
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class JobNode(Node):  # type: ignore[misc]
        def start_ray_processes(self) -> None:
            super().start_ray_processes()
            threading.Thread(target=_give_up_early, args=(self, up, answers), daemon=True).start()

        def start_api_server(self, **options: Any) -> None:
            if orders.dashboard:
                super().start_api_server(**options)

    first, last = orders.worker_ports
    parameters = RayParams(
        gcs_address=None if orders.head else orders.gcs_address,
        gcs_server_port=int(orders.gcs_address.rpartition(":")[2]) if orders.head else None,
        node_ip_address=orders.address,
        node_name=orders.name,
        temp_dir=orders.temp_dir,
        num_cpus=orders.num_cpus,
        num_gpus=orders.num_gpus,
        memory=orders.memory,
        object_store_memory=orders.object_store_memory,
        resources={},
        labels={},
        min_worker_port=first,
        max_worker_port=last,
        include_dashboard=orders.dashboard,
        dashboard_host="127.0.0.1",
        dashboard_port=orders.dashboard_port,
        no_monitor=True,
        include_log_monitor=True,
        **orders.services,
    )
    up = threading.Event()
    # Every process dies with this one; nothing is left to a reaper.
    node = JobNode(parameters, head=orders.head, shutdown_at_exit=False, spawn_reaper=True)
    up.set()
    return node


def _give_up_early(node: Any, up: threading.Event, answers: TextIO) -> None:
    """Ray waits 30 s for a raylet that has died while it started; this does not."""
    while not up.wait(POLL_S):
        if dead := node.dead_processes():
            kind, process = dead[0]
            answers.write(f"{ENDED} {kind} {process.returncode}\n")
            os._exit(1)


def write_timeline(gcs_address: str, path: Path) -> None:
    """Tasks of the whole job in the form of chrome://tracing and Perfetto."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    options = GcsClientOptions.create(gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
    state._initialize_global_state(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    state.chrome_tracing_dump(str(path))


def _serve(node: Any, answers: TextIO) -> int:
    """Until the parent is gone or one of the processes is."""
    while True:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            order, _, argument = sys.stdin.readline().rstrip("\n").partition(" ")
            if not order:
                return 0
            if order == TIMELINE:
                answers.write(f"{TIMELINE} {_timeline_answer(node, Path(argument))}\n")
        for kind, process in node.dead_processes():
            answers.write(f"{ENDED} {kind} {process.returncode}\n")
            return 1


def _timeline_answer(node: Any, path: Path) -> str:
    """What went wrong, or nothing."""
    try:
        write_timeline(node.gcs_address, path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
