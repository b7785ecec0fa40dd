import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hpc_rl.errors import UserError
from hpc_rl.node.network import free_port
from hpc_rl.node.roll_call import Caller, RollCall, allow_connections, signature

SECRET = b"of this job"


@pytest.fixture
def roll() -> Iterator[tuple[RollCall, int]]:
    port = free_port("127.0.0.1")
    roll = RollCall("127.0.0.1", port, 3, SECRET)
    yield roll, port
    roll.close()


def until(condition: Callable[[], bool], roll: RollCall) -> list[tuple[int, str]]:
    """Poll until a condition holds, and return what was received."""
    deadline, received = time.monotonic() + 600, []
    while not condition():
        assert time.monotonic() < deadline
        received += roll.poll()
        time.sleep(0.01)
    return received + roll.poll()


def test_nodes_call_send_lines_and_leave(roll: tuple[RollCall, int]) -> None:
    head, port = roll
    first, second = (Caller("127.0.0.1", port, rank, SECRET, timeout_s=600) for rank in (1, 2))
    assert head.seen == {0}
    second.send("up")
    second.send("end " + "x" * 20_000)
    second.close()
    received = until(lambda: head.seen == {0, 1, 2} and 2 in head.closed, head)
    assert received == [(2, "up"), (2, "end " + "x" * 20_000)] and head.present == {1}
    head.tell_all("stop")
    head.tell_all("outcome 75")
    lines: list[str] = []
    until(lambda: bool(lines.extend(first.poll()) or len(lines) == 2), head)
    assert lines == ["stop", "outcome 75"] and first.closed is None
    first.close()
    until(lambda: not head.present, head)


def test_a_killed_process_is_told_at_once(roll: tuple[RollCall, int]) -> None:
    head, port = roll
    code = f"from hpc_rl.node.roll_call import *; c = Caller('127.0.0.1', {port}, 1, {SECRET!r}, 600); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        until(lambda: 1 in head.seen, head)
        child.send_signal(signal.SIGKILL)
    until(lambda: 1 in head.closed, head)
    assert head.closed[1].how == "its processes ended" and head.closed[1].machine_answers


def test_a_head_that_ends_is_told(roll: tuple[RollCall, int]) -> None:
    head, port = roll
    caller = Caller("127.0.0.1", port, 1, SECRET, timeout_s=600)
    until(lambda: 1 in head.seen, head)
    head.close()
    deadline = time.monotonic() + 600
    while caller.closed is None:
        assert caller.poll() == [] and time.monotonic() < deadline
    assert caller.closed.machine_answers


def test_node_0_may_open_a_file_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_connections(704)
    assert raised == []
    for nodes in (705, 3776):
        allow_connections(nodes)
    assert raised == [(1025, 4096), (4096, 4096)]
    with pytest.raises(UserError, match=r"3,777 nodes needs 4,097 open files .* at most 4,096 \(ulimit -Hn\)"):
        allow_connections(3777)


def sent_away(stranger: socket.socket, roll: RollCall) -> bool:
    roll.poll()
    try:
        return stranger.recv(10) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_strangers_are_sent_away_and_do_not_take_a_place(roll: tuple[RollCall, int]) -> None:
    head, port = roll
    for said in (b"up\nend 0\n", signature(b"another job", 1).encode() + b"\n", b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", port), timeout=600) as stranger:
            stranger.sendall(said)
            stranger.setblocking(False)
            until(lambda stranger=stranger: sent_away(stranger, head), head)  # type: ignore[misc]
    silent = []
    for _ in range(100):
        silent.append(socket.create_connection(("127.0.0.1", port), timeout=600))
        head.poll()
    own = Caller("127.0.0.1", port, 1, SECRET, timeout_s=600)
    until(lambda: 1 in head.seen, head)
    again = Caller("127.0.0.1", port, 1, SECRET, timeout_s=600)  # one connection per node
    until(lambda: again.poll() == [] and again.closed is not None, head)
    assert head.seen == {0, 1} and not head.closed
    for stranger in silent:
        stranger.setblocking(False)
    until(lambda: all(sent_away(stranger, head) for stranger in silent), head)
    own.close()
