from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hpc_rl.rl.rollout.http_calls import HttpClient, UnreachableError
from hpc_rl.rl.rollout.sglang import own_connection
from hpc_rl.rl.rollout.sglang.own_connection import is_own_listener, is_own_peer, own_client
from tests.rl.rollout.test_http_calls import DEADLINE_S, answering
from tests.security.intruder import INTRUDER, as_user

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
SERVER, CLIENT = ("127.0.0.1", 10000), ("127.0.0.1", 40000)
NO_END = "00000000:0000"
ME = os.getuid()


@contextmanager
def listening(address: str) -> Iterator[tuple[str, int]]:
    with socket.create_server((address, 0)) as server:
        yield server.getsockname()


def table(tmp_path: Path, local: str, remote: str, state: str, owner: int, inode: int = 7) -> Path:
    """Return the kernel's table with one socket."""
    line = f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {owner:5} 0 {inode} 1 0 100 0\n"
    (tmp_path / "tcp").write_text(HEADER + line)
    return tmp_path / "tcp"


def test_a_socket_of_this_process_that_listens() -> None:
    with listening("127.0.0.1") as (host, port):
        assert is_own_listener((host, port)) and not is_own_listener(("127.0.0.2", port))
    assert not is_own_listener((host, port))


def test_a_socket_that_only_has_the_port_does_not_listen() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not is_own_listener(bound.getsockname())


def test_a_listener_at_all_addresses_is_not_the_listener_of_one() -> None:
    """Whoever listens at the exact address later would get the connections."""
    with listening("0.0.0.0") as (host, port):
        assert not is_own_listener(("127.0.0.1", port)) and is_own_listener((host, port))


def test_a_server_of_this_process_has_its_connection_before_and_after_it_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        address, port = client.getsockname()
        assert is_own_peer(client.getpeername(), (address, port))
        with server.accept()[0]:
            assert is_own_peer(client.getpeername(), (address, port))
            assert not is_own_peer(client.getpeername(), ("127.0.0.9", port))


@pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
def test_another_user_is_not_this_one() -> None:
    with as_user(INTRUDER):
        server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client:
        assert not is_own_listener(server.getsockname())
        with as_user(INTRUDER):
            connection, _ = server.accept()
        with connection:
            assert not is_own_peer(client.getpeername(), client.getsockname())


@pytest.mark.parametrize(
    "local, remote, state, owner, own",
    [
        ("0100007F:2710", NO_END, "0A", ME, True),
        ("0100007F:2710", NO_END, "0A", ME + 1, False),
        ("0100007F:2710", NO_END, "07", ME, False),
        ("0100007F:2710", "0100007F:9C40", "0A", ME, False),
        ("0100007F:2711", NO_END, "0A", ME, False),
    ],
)
def test_what_listens(tmp_path: Path, local: str, remote: str, state: str, owner: int, own: bool) -> None:
    assert is_own_listener(SERVER, table(tmp_path, local, remote, state, owner)) is own


@pytest.mark.parametrize(
    "local, remote, owner, inode, own",
    [
        ("0100007F:2710", "0100007F:9C40", ME, 7, True),
        ("0100007F:2710", "0100007F:9C40", ME + 1, 7, False),
        ("0100007F:2710", "0100007F:9C40", ME + 1, 0, True),  # waits for the listener
        ("0100007F:9C40", "0100007F:2710", ME, 7, False),
        ("0100007F:2710", "0200007F:9C40", ME, 7, False),
    ],
)
def test_who_has_a_connection(tmp_path: Path, local: str, remote: str, owner: int, inode: int, own: bool) -> None:
    assert is_own_peer(SERVER, CLIENT, table(tmp_path, local, remote, "01", owner, inode)) is own


def test_an_own_server_is_called_without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with answering([]) as url:
        client = own_client(url, "secret")
        assert client.get("/", DEADLINE_S).status == 200
    with pytest.raises(UnreachableError, match="no process of this user listens"):
        client.post("/", {}, DEADLINE_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
def test_another_user_at_the_port_of_an_own_server_receives_nothing() -> None:
    asked: list[str] = []
    with ExitStack() as running:
        with as_user(INTRUDER):
            url = running.enter_context(answering(asked))
        client = own_client(url, "secret")
        for call in (lambda: client.get("/health", DEADLINE_S), lambda: client.post("/", {}, DEADLINE_S)):
            with pytest.raises(UnreachableError, match=r"no process of this user listens at 127\.0\.0\.1:"):
                call()
        assert asked == [] and HttpClient(url, "secret").get("/other", DEADLINE_S).status == 200
    assert asked == ["/other"]


@pytest.mark.parametrize("listens, has_connection", [([False], []), ([True, False], []), ([True, True], [False])])
def test_nothing_is_sent_unless_an_own_server_listens_and_has_the_connection(
    listens: list[bool], has_connection: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to listen before and after the connection is made: somebody else may take the port in between."""
    asked: list[str] = []
    left, peers = iter(listens), iter(has_connection)
    monkeypatch.setattr(own_connection, "is_own_listener", lambda _: next(left))
    monkeypatch.setattr(own_connection, "is_own_peer", lambda *_: next(peers))
    with answering(asked) as url, pytest.raises(UnreachableError, match="no process of this user listens"):
        own_client(url, "secret").get("/", DEADLINE_S)
    assert [*left, *peers] == [] and asked == []
