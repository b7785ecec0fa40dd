"""Starts the Ray processes of one node, like `ray start --block`, without the services that a job does not use.

`ray start --head` also starts an autoscaler, a client server and a dashboard, and waits for the dashboard. They would
take half of the start-up time and open three more ports. This is a separate process, so that the node entry that
supervises it does not import Ray.

Commands are lines on standard input, answers are lines on standard output. All other output goes to the log.
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

from hpc_rl.formats.offer import LENT
from hpc_rl.node.ray_cluster.ports import AGENT_PORTS
from hpc_rl.software.ray_python import without_spaces
from hpc_rl.system.processes import die_with_parent

POLL_S = 0.1
UP = "up"
ENDED = "ended"
TIMELINE = "timeline"


@dataclass(frozen=True)
class StartOptions:
    """Options of one Ray node. Their JSON is the first command."""

    head: bool
    gcs_address: str
    """`host:port` of the global control store, which the head starts."""
    address: str
    """IPv4 address of this node."""
    name: str
    temp_dir: str
    num_cpus: int
    num_gpus: int
    gpu_resource: str
    """Ray's name of the devices: GPU, NPU, or CPU if there are none."""
    memory: int
    object_store_memory: int
    services: dict[str, int]
    """Ports of the node's services."""
    worker_ports: list[int]
    dashboard: bool
    """Whether the job has a dashboard. Every node reports to it."""
    dashboard_port: int
    """Port on the loopback of the head."""
    lent: int = 0
    """Places, such as those for engines, that the node lends to the run of another job; 0 for a node of the run."""
    lent_resource: str = LENT
    """Ray's resource of these places."""

    def as_line(self) -> str:
        """Return the options as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def main() -> int:
    """Import Ray, read the options, start the node and serve commands until the end."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _leave)
    # Before the options arrive, which is when node 0 is up: importing Ray takes as long as starting it.
    import ray._private.node  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        return 1
    node = start_node(StartOptions(**json.loads(line)), answers)
    try:
        answers.write(f"{UP}\n")
        return _serve(node, answers)
    finally:
        # A second signal must not interrupt this.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.kill_all_processes(check_alive=False, allow_graceful=True)


def start_node(options: StartOptions, answers: TextIO) -> Any:
    """Start the processes and wait until they have joined the cluster."""
    if not options.dashboard:
        # Without this module Ray starts its agents as after a plain `pip install ray`: faster, and without open ports.
        sys.modules["ray.dashboard.optional_deps"] = None  # type: ignore[assignment]
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class JobNode(Node):  # type: ignore[misc]
        def start_ray_processes(self) -> None:
            super().start_ray_processes()
            threading.Thread(target=_give_up_early, args=(self, up, answers), daemon=True).start()

        def start_raylet(self, *arguments: Any, **settings: Any) -> None:
            _tell_ports(self, options.services)
            super().start_raylet(*arguments, **settings)

        def start_api_server(self, **settings: Any) -> None:
            if options.dashboard:
                super().start_api_server(**settings)

    sys.executable = without_spaces(Path(options.temp_dir))
    parameters = RayParams(
        gcs_address=None if options.head else options.gcs_address,
        gcs_server_port=int(options.gcs_address.rpartition(":")[2]) if options.head else None,
        node_ip_address=options.address,
        node_name=options.name,
        temp_dir=options.temp_dir,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus if options.gpu_resource == "GPU" else 0,
        memory=options.memory,
        object_store_memory=options.object_store_memory,
        resources=_resources(options),
        labels={},
        worker_port_list=",".join(map(str, options.worker_ports)),
        include_dashboard=options.dashboard,
        dashboard_host="127.0.0.1",
        dashboard_port=options.dashboard_port,
        no_monitor=True,
        include_log_monitor=True,
        **options.services,
    )
    up = threading.Event()
    # Every process ends with this one.
    node = JobNode(parameters, head=options.head, shutdown_at_exit=False, spawn_reaper=True)
    up.set()
    return node


def _resources(options: StartOptions) -> dict[str, int]:
    """Return the resources that Ray does not know by itself. A lent node has one with its name, for what has to be on
    this node: the nodes of two jobs may share an address."""
    found = {} if options.gpu_resource in ("GPU", "CPU") else {options.gpu_resource: options.num_gpus}
    return {**found, options.lent_resource: options.lent, options.name: 1} if options.lent else found


def _tell_ports(node: Any, services: dict[str, int]) -> None:
    """Write the ports of a node's agent into the files from which its raylet reads them.

    Otherwise the raylet waits for the agent to write them, and ends if that takes more than 15 s. The ports are fixed,
    so that the agent writes the same ones.
    """
    try:
        from ray._raylet import persist_port
    except ImportError:
        return  # in earlier versions of Ray, the raylet reads no files
    for name in AGENT_PORTS:
        persist_port(node.get_session_dir_path(), node.node_id, name, services[name] or -1)  # -1: none


def _give_up_early(node: Any, up: threading.Event, answers: TextIO) -> None:
    """Report a raylet that died during start-up at once. Ray itself would wait for 30 s."""
    while not up.wait(POLL_S):
        if dead := node.dead_processes():
            kind, process = dead[0]
            answers.write(f"{ENDED} {kind} {process.returncode}\n")
            os._exit(1)


def write_timeline(gcs_address: str, path: Path) -> None:
    """Write the tasks of the whole job in the format of chrome://tracing and Perfetto."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    client = GcsClientOptions.create(gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
    state._initialize_global_state(client)
    path.parent.mkdir(parents=True, exist_ok=True)
    state.chrome_tracing_dump(str(path))


def _serve(node: Any, answers: TextIO) -> int:
    """Serve commands until the parent or one of Ray's processes has ended. Returns the exit code."""
    while True:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            command, _, argument = sys.stdin.readline().rstrip("\n").partition(" ")
            if not command:
                return 0
            if command == TIMELINE:
                answers.write(f"{TIMELINE} {_timeline_answer(node, Path(argument))}\n")
        for kind, process in node.dead_processes():
            answers.write(f"{ENDED} {kind} {process.returncode}\n")
            return 1


def _timeline_answer(node: Any, path: Path) -> str:
    """Write the timeline and return the error, or an empty text."""
    try:
        write_timeline(node.gcs_address, path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
