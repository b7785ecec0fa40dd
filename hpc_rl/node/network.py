"""Which of a node's addresses the other nodes can reach."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct

from hpc_rl.errors import UserError

# ioctl numbers of netdevice(7).
_SIOCGIFADDR = 0x8915


def interface_addresses() -> dict[str, str]:
    """Interface name -> its IPv4 address, for interfaces that have one."""
    return {name: address for _, name in socket.if_nameindex() if (address := _ipv4_of(name))}


def choose_address(interface: str | None, peer: str | None) -> tuple[str, str]:
    """(interface, IPv4 address) by which this node talks to the others.

    Args:
        interface: the configured one, or None for the one that routes to `peer`.
        peer: name of another node; None for a job on one node, which stays on the loopback.

    Raises:
        UserError: the interface does not exist or has no IPv4 address, or nothing routes to the peer.
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
    """The address that packets to `peer` would carry; a UDP connect asks the routing table and sends nothing."""
    try:
        candidates = socket.getaddrinfo(peer, 9, socket.AF_INET, socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    for *_, address in candidates:
        # A node's own hosts file may name itself, or even a peer, on the loopback.
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
