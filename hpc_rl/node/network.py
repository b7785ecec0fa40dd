"""Network addresses and TCP ports of a node: addresses that the other nodes can reach, ports that do not collide."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from hpc_rl.errors import UserError

_SIOCGIFADDR = 0x8915  # netdevice(7)
_FIRST_PORT = 12000
"""Lowest port of a job, above those of most services."""
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def interface_addresses() -> dict[str, str]:
    """Return interface name -> IPv4 address, for the interfaces that have one."""
    return {name: address for _, name in socket.if_nameindex() if (address := _ipv4_of(name))}


def choose_address(interface: str | None, peer: str | None) -> tuple[str, str]:
    """Return the (interface, IPv4 address) that the other nodes reach this node by.

    Args:
        interface: the configured interface. If it is None, the one that routes to `peer` is taken.
        peer: name of another node, or None for a job on one node, which uses the loopback.

    Raises:
        UserError: the interface has no IPv4 address on this node, or there is no route to the peer.
    """
    addresses = interface_addresses()
    if interface is not None:
        if interface not in addresses:
            raise UserError(
                f"interface {interface} has no IPv4 address on {socket.gethostname()}: there are "
                f"{_listed(addresses)}; set slurm.interface to one of them"
            )
        return interface, addresses[interface]
    if peer is None:
        return "lo", "127.0.0.1"
    source = _source_address(peer)
    for name, address in addresses.items():
        if address == source and not _is_local(address):
            return name, address
    raise UserError(
        f"no route from {socket.gethostname()} to node {peer}: interfaces are {_listed(addresses)}; "
        "set slurm.interface to the one between the nodes"
    )


def _source_address(peer: str) -> str | None:
    """Return the source address of packets to `peer`. A UDP connect asks the routing table and sends nothing."""
    try:
        candidates = socket.getaddrinfo(peer, 9, socket.AF_INET, socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    for *_, address in candidates:
        # A node's hosts file may map its own name, or even a peer's, to the loopback.
        if _is_local(str(address[0])):
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            source: str = probe.getsockname()[0]
            return source
    return None


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_loopback or parsed.is_link_local


def _ipv4_of(name: str) -> str | None:
    request = array.array("B", struct.pack("256s", name.encode()[:15]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(request.tobytes()[20:24])


def _listed(addresses: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in addresses.items()) or "none"


def free_port(key: str, address: str) -> int:
    """Return a port that is free on `address`, below the kernel's ephemeral range.

    The search starts at a port derived from `key` (job id and restart), so that two jobs that start on one node at the
    same time do not compete for the same port.

    Raises:
        UserError: all ports of the range are taken.
    """
    last = _last_port()
    for port in _candidates(key, _FIRST_PORT, last):
        if _is_free(port, address):
            return port
    raise UserError(f"no free TCP port between {_FIRST_PORT} and {last} on {socket.gethostname()}")


class PortBlock:
    """Consecutive ports that are reserved for this process by a socket on the first of them.

    A context manager. Two jobs that start on one node at the same time cannot get the same block.
    """

    def __init__(self, first: int, guard: socket.socket) -> None:
        self.first = first
        self._guard = guard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._guard.close()


def free_block(key: str, size: int) -> PortBlock:
    """Reserve a block of `size` ports that are free on every interface, below the kernel's ephemeral range.

    Raises:
        UserError: there is no such block.
    """
    last = _last_port()
    for number in _candidates(key, 0, (last - _FIRST_PORT + 1) // size - 1):
        first = _FIRST_PORT + number * size
        if block := _take(first, size):
            return block
    raise UserError(f"no {size} free TCP ports in a row between {_FIRST_PORT} and {last} on {socket.gethostname()}")


def given_block(first: int, size: int, setting: str) -> PortBlock:
    """Reserve the block that the user configured.

    Args:
        setting: name of the option, for the message.

    Raises:
        UserError: one of its ports is taken or above 65535.
    """
    ports = f"ports {first} to {first + size - 1} ({setting})"
    if first + size - 1 > 65535:
        raise UserError(f"{ports}: the highest port is 65535; choose a lower {setting}")
    if block := _take(first, size):
        return block
    taken = next((port for port in range(first, first + size) if not _is_free(port, "")), first)
    raise UserError(
        f"{ports} are occupied on {socket.gethostname()}: something uses port {taken}; "
        f"choose others, or leave {setting} out"
    )


def _take(first: int, size: int) -> PortBlock | None:
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        guard.bind(("", first))  # without SO_REUSEADDR, so that no other process can bind it
    except OSError:
        guard.close()
        return None
    if all(_is_free(port, "") for port in range(first + 1, first + size)):
        return PortBlock(first, guard)
    guard.close()
    return None


def _is_free(port: int, address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _candidates(key: str, first: int, last: int) -> Iterator[int]:
    size = last - first + 1
    start = zlib.crc32(key.encode()) % size
    return (first + (start + step) % size for step in range(size))


def _last_port() -> int:
    try:
        lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_ephemeral = 32768
    # If the ephemeral range covers nearly all ports, there is no room below it.
    return lowest_ephemeral - 1 if lowest_ephemeral > _FIRST_PORT + 1000 else 65535
