"""Network addresses and TCP ports of a node: addresses that the other nodes can reach, ports that do not collide."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from hpc_rl.errors import UserError
from hpc_rl.slurm.commands import node_address

_SIOCGIFADDR = 0x8915  # netdevice(7)
_FIRST_PORT = 12000
"""Lowest port of a job, above those of most services."""
RESOLVE_S = 5.0
"""How long names of nodes are looked up for `no_proxy`."""
_ANYWHERE = "198.51.100.1"
"""An address that belongs to nobody (RFC 5737): packets to it would take the default route."""
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
    named = _addresses_of(peer)
    for peers in _candidates(peer, named):
        source = _source_address(peers)
        for name, address in addresses.items():
            if address == source and not _is_local(address):
                return name, address
    cause = f"it resolves to {', '.join(named)}" if named else "its name does not resolve, and Slurm gives no address"
    raise UserError(
        f"no route from {socket.gethostname()} to node {peer}: {cause}; interfaces are {_listed(addresses)}, without a "
        "default route; set slurm.interface to the one between the nodes"
    )


def _candidates(peer: str, named: list[str]) -> Iterator[list[str]]:
    """Yield addresses of a node, the best first: the last one leads to the default route."""
    yield named
    # Slurm may have an address of a node whose name nothing else resolves (NodeAddr in slurm.conf).
    yield _addresses_of(node_address(peer))
    yield [_ANYWHERE]


def addresses_of(names: Iterable[str]) -> list[str]:
    """Return the IPv4 addresses of these hosts, as far as they are found within RESOLVE_S."""
    found: list[str] = []
    deadline = time.monotonic() + RESOLVE_S
    for name in dict.fromkeys(names):
        if time.monotonic() > deadline:
            break
        with suppress(OSError):
            found.append(socket.gethostbyname(name))
    return found


def with_usable_interfaces(environ: Mapping[str, str], interface: str) -> tuple[dict[str, str], list[str]]:
    """Return the environment without names of interfaces that this node does not have, and a sentence for each.

    Args:
        interface: the one between the nodes. gloo's variable gets it; the other libraries choose by themselves.
    """
    here = [name for _, name in socket.if_nameindex()]
    found, said = dict(environ), []
    for variable, matches in _INTERFACE_VARIABLES.items():
        value = environ.get(variable)
        if value is None or matches(value, here):
            continue
        del found[variable]
        replaced = f"{interface} is used" if variable == _GLOO else "it is removed"
        said.append(f"{variable}={value} fits no interface of this node in this library's syntax: {replaced}")
    return found, said


def _are_names(value: str, interfaces: Sequence[str]) -> bool:
    """Return whether a value lists interfaces by their names, separated by commas."""
    return all(name in interfaces for name in value.split(","))


def _has_match(value: str, interfaces: Sequence[str]) -> bool:
    """Return whether a value in NCCL's syntax (prefixes; = for names, ^ for all others) leaves an interface."""
    negative, rest = value.startswith("^"), value.removeprefix("^")
    is_exact, names = rest.startswith("="), rest.removeprefix("=").split(",")
    names = [name.partition(":")[0] for name in names if name]
    hits = {one for one in interfaces for name in names if one == name or (not is_exact and one.startswith(name))}
    return bool(set(interfaces) - hits if negative else hits)


_GLOO = "GLOO_SOCKET_IFNAME"
_INTERFACE_VARIABLES: dict[str, Callable[[str, Sequence[str]], bool]] = {
    _GLOO: _are_names,
    "TP_SOCKET_IFNAME": _are_names,
    "CCL_KVS_IFACE": _are_names,
    "NCCL_SOCKET_IFNAME": _has_match,
    "HCCL_SOCKET_IFNAME": _has_match,
}
"""Variable -> whether its library can use a value on a node with these interfaces. gloo takes `^lo` for a name."""


def _addresses_of(name: str | None) -> list[str]:
    try:
        found = socket.getaddrinfo(name, 9, socket.AF_INET, socket.SOCK_DGRAM) if name else []
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _source_address(peers: Sequence[str]) -> str | None:
    """Return the source address of packets to a peer. A UDP connect asks the routing table and sends nothing."""
    for peer in peers:
        # A node's hosts file may map its own name, or even a peer's, to the loopback.
        if _is_local(peer):
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))
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


def free_port(address: str) -> int:
    """Return a random port that is free on `address`, below the kernel's ephemeral range.

    It is random so that two jobs on one node rarely compete for a port, and so that nobody can occupy it beforehand.

    Raises:
        UserError: all ports of the range are taken.
    """
    last = _last_port()
    for port in _shuffled(range(_FIRST_PORT, last + 1)):
        if _is_free(port, address):
            return port
    raise UserError(f"no free TCP port between {_FIRST_PORT} and {last} on {socket.gethostname()}")


class PortBlocks:
    """Blocks of consecutive ports that are reserved for this process by a socket on the first port of each.

    A context manager. Two jobs that start on one node at the same time cannot get the same block.
    """

    def __init__(self) -> None:
        self.firsts: tuple[int, ...] = ()
        """The first port of each block."""
        self._guards: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def take(self, first: int, size: int) -> bool:
        """Reserve the block of `size` ports from `first` on, if all of them are free on every interface."""
        guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            guard.bind(("", first))  # without SO_REUSEADDR, so that no other process can bind it
        except OSError:
            guard.close()
            return False
        if not all(_is_free(port, "") for port in range(first + 1, first + size)):
            guard.close()
            return False
        self.firsts += (first,)
        self._guards.append(guard)
        return True

    def close(self) -> None:
        for guard in self._guards:
            guard.close()


def free_blocks(count: int, size: int) -> PortBlocks:
    """Reserve `count` blocks of `size` ports in random places below the kernel's ephemeral range.

    Blocks are small and scattered, because a single listening socket makes a block useless.

    Raises:
        UserError: there are not so many.
    """
    last, found = _last_port(), PortBlocks()
    for number in _shuffled(range((last - _FIRST_PORT + 1) // size)):
        if len(found.firsts) == count:
            return found
        found.take(_FIRST_PORT + number * size, size)
    if len(found.firsts) == count:
        return found
    found.close()
    raise UserError(
        f"no {count * size} free TCP ports in blocks of {size} between {_FIRST_PORT} and {last} on "
        f"{socket.gethostname()}"
    )


def given_blocks(first: int, count: int, size: int, setting: str) -> PortBlocks:
    """Reserve the consecutive blocks that the user configured.

    Args:
        setting: name of the option, for the message.

    Raises:
        UserError: one of their ports is taken or above 65535.
    """
    last = first + count * size - 1
    ports = f"ports {first} to {last} ({setting})"
    if last > 65535:
        raise UserError(f"{ports}: the highest port is 65535; choose a lower {setting}")
    found = PortBlocks()
    if all(found.take(block, size) for block in range(first, last + 1, size)):
        return found
    found.close()
    taken = next((port for port in range(first, last + 1) if not _is_free(port, "")), first)
    raise UserError(
        f"{ports} are occupied on {socket.gethostname()}: something uses port {taken}; "
        f"choose others, or leave {setting} out"
    )


def _is_free(port: int, address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _shuffled(numbers: range) -> list[int]:
    return random.SystemRandom().sample(numbers, len(numbers))


def _last_port() -> int:
    try:
        lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_ephemeral = 32768
    # If the ephemeral range covers nearly all ports, there is no room below it.
    return lowest_ephemeral - 1 if lowest_ephemeral > _FIRST_PORT + 1000 else 65535
