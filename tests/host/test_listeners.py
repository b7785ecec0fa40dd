from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_rl.host.listeners import is_own_listener
from tests.security.intruder import INTRUDER, as_user

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@contextmanager
def listening(address: str) -> Iterator[int]:
    with socket.create_server((address, 0)) as server:
        yield int(server.getsockname()[1])


def test_a_socket_of_this_process_that_listens() -> None:
    with listening("127.0.0.1") as port:
        assert is_own_listener("127.0.0.1", port)
        assert not is_own_listener("127.0.0.2", port)
    assert not is_own_listener("127.0.0.1", port)


def test_a_socket_that_only_has_the_port_does_not_listen() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not is_own_listener(*bound.getsockname())


def test_a_listener_at_all_addresses_is_not_the_listener_of_one() -> None:
    """Whoever listens at the exact address later would get the connections."""
    with listening("0.0.0.0") as port:
        assert not is_own_listener("127.0.0.1", port) and is_own_listener("0.0.0.0", port)


@pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
def test_another_user_is_not_this_one() -> None:
    with as_user(INTRUDER):
        server = socket.create_server(("127.0.0.1", 0))
    with server:
        assert not is_own_listener(*server.getsockname())


@pytest.mark.parametrize(
    "line, own",
    [
        ("   0: 0100007F:2710 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid:5} 0 7 1 0 100 0", True),
        ("   0: 0100007F:2710 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {other:5} 0 7 1 0 100 0", False),
        ("   0: 0100007F:2710 0100007F:9999 01 00000000:00000000 00:00000000 00000000 {uid:5} 0 7 1 0 100 0", False),
        ("   0: 0100007F:2711 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid:5} 0 7 1 0 100 0", False),
    ],
)
def test_the_kernels_table(tmp_path: Path, line: str, own: bool) -> None:
    table = tmp_path / "tcp"
    table.write_text(HEADER + line.format(uid=os.getuid(), other=os.getuid() + 1) + "\n")
    assert is_own_listener("127.0.0.1", 10000, table) is own
