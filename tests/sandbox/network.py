"""The sandbox's network: a switch inside the controller's network namespace, with a cable to the host and each node.

Only one end of a cable is visible on the host, and the kernel removes everything when the machines' processes end.
Because the switch is in a namespace, the host's firewall rules for bridges do not apply to it.
"""

import socket
import subprocess
import zlib
from collections.abc import Collection

from tests.sandbox.processes import DEADLINE_S, SandboxError

HOST, CONTROLLER = 253, 254  # last number of their addresses; node1 has 1


def host_link(name: str) -> str:
    """Return the name of the host's end of its cable: a hash, because interface names have at most 15 characters."""
    return f"hpcrl{zlib.crc32(name.encode()):08x}"


def ip(*commands: str, pid: int | None = None) -> None:
    """Run `ip` commands as one batch, in the network namespace of process `pid`."""
    inside = [] if pid is None else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    batch = "".join(f"{command}\n" for command in commands)
    done = subprocess.run(
        [*inside, "ip", "-batch", "-"], input=batch, text=True, capture_output=True, timeout=DEADLINE_S
    )
    if done.returncode != 0:
        raise SandboxError(f"ip: {done.stderr.strip()}; the commands were:\n{batch}")


def free_subnet(name: str, taken: Collection[str]) -> str:
    """Return the first three numbers of a free subnet, derived from the name, so that it usually stays the same."""
    routes = subprocess.run(
        ["ip", "-4", "route"], text=True, check=True, capture_output=True, timeout=DEADLINE_S
    ).stdout
    first = zlib.crc32(name.encode())
    for number in ((first + step) % 250 for step in range(250)):
        if f"10.77.{number}." not in routes and f"10.77.{number}" not in taken:
            return f"10.77.{number}"
    raise SandboxError("10.77.0.0/24 to 10.77.249.0/24 are all in use on this host")


def _mac(subnet: str, number: int) -> str:
    """Return a fixed address, so that the ARP tables stay valid if a machine is replaced."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in [*subnet.split("."), number])


def _second(subnet: str) -> str:
    """Return the first three numbers of the addresses on the second network. The host has no address there."""
    return subnet.replace("10.77.", "10.78.")


def _configure(subnet: str, number: int, interface: str) -> list[str]:
    return [f"address add {subnet}.{number}/24 dev {interface}", f"link set {interface} up"]


def _bridge(subnet: str, interface: str) -> list[str]:
    """Return the commands for a switch, which is also an interface of the controller."""
    make = f"link add {interface} address {_mac(subnet, CONTROLLER)} type bridge"
    return [make, *_configure(subnet, CONTROLLER, interface)]


def make_switch(controller: int, name: str, subnet: str, second: str) -> None:
    """Create the switch, and one for the `second` network if that has a name. `controller` is a pid."""
    ip("link set lo up", *_bridge(subnet, "eth0"), pid=controller)
    if second:
        ip(*_bridge(_second(subnet), second), pid=controller)
    link = host_link(name)
    ip(
        f"link add {link} address {_mac(subnet, HOST)} type veth peer name host netns {controller}",
        f"address add {subnet}.{HOST}/24 dev {link}",
        f"link set {link} up",
    )
    ip("link set host master eth0 up", pid=controller)


def plug_in(controller: int, node: int, subnet: str, number: int, second: str) -> None:
    """Connect node `number`, whose first process is `node`, to the switches."""
    ip("link set lo up", pid=node)
    subnets = {"eth0": subnet} | ({second: _second(subnet)} if second else {})
    for interface, net in subnets.items():
        port = _port(number, interface)
        cable = f"link add {port} type veth peer name {interface} address {_mac(net, number)} netns {node}"
        ip(cable, f"link set {port} master {interface} up", pid=controller)
        ip(*_configure(net, number, interface), pid=node)


def _port(number: int, interface: str) -> str:
    return f"node{number}" if interface == "eth0" else f"node{number}-{interface}"


def unplug(controller: int, number: int, second: str) -> None:
    """Disconnect a node without any notice to its peers."""
    for interface in ["eth0", *([second] if second else [])]:
        ip(f"link delete {_port(number, interface)}", pid=controller)


def unplug_host(name: str) -> None:
    """Remove the cable to the host at once. The kernel would remove it some time after the controller's end."""
    show = ["ip", "link", "show", host_link(name)]
    if subprocess.run(show, capture_output=True, timeout=DEADLINE_S).returncode == 0:
        subprocess.run(["ip", "link", "delete", host_link(name)], capture_output=True, timeout=DEADLINE_S)


def answers(subnet: str, port: int) -> bool:
    """Return whether the controller accepts connections. If it does not, Slurm's commands would block."""
    try:
        socket.create_connection((f"{subnet}.{CONTROLLER}", port), timeout=1).close()
    except OSError:
        return False
    return True
