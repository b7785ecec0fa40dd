"""The sandbox's network: a switch inside the controller's network namespace, with a cable to the host and each node.

Nothing but one end of a cable is visible on the host, and the kernel removes everything when the machines' processes
end. Being in a namespace, the switch is out of reach of the host's firewall rules for bridges.
"""

import socket
import subprocess
import zlib
from collections.abc import Collection

from tests.sandbox.processes import SandboxError

HOST, CONTROLLER = 253, 254  # last number of the addresses; node1 has 1


def host_link(name: str) -> str:
    """Name of the host's end of its cable. Interface names end at 15 characters, sandbox names do not: hence a hash."""
    return f"hpcrl{zlib.crc32(name.encode()):08x}"


def ip(*commands: str, pid: int | None = None) -> None:
    """Run `ip` commands as one batch, in the network namespace of process `pid`."""
    inside = [] if pid is None else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    batch = "".join(f"{command}\n" for command in commands)
    done = subprocess.run([*inside, "ip", "-batch", "-"], input=batch, text=True, capture_output=True, timeout=20)
    if done.returncode != 0:
        raise SandboxError(f"ip: {done.stderr.strip()}; the commands were:\n{batch}")


def free_subnet(name: str, taken: Collection[str]) -> str:
    """First three numbers of a subnet that is not in use here; it follows from the name, so that it tends to stay."""
    routes = subprocess.run(["ip", "-4", "route"], text=True, check=True, capture_output=True, timeout=20).stdout
    first = zlib.crc32(name.encode())
    for number in ((first + step) % 250 for step in range(250)):
        if f"10.77.{number}." not in routes and f"10.77.{number}" not in taken:
            return f"10.77.{number}"
    raise SandboxError("10.77.0.0/24 to 10.77.249.0/24 are all in use on this host")


def _mac(subnet: str, number: int) -> str:
    """Fixed addresses, so that neighbours' tables stay right when a machine is replaced."""
    return f"02:00:0a:4d:{int(subnet.rpartition('.')[2]):02x}:{number:02x}"


def _configure(subnet: str, number: int) -> list[str]:
    return ["link set lo up", f"address add {subnet}.{number}/24 dev eth0", "link set eth0 up"]


def make_switch(controller: int, name: str, subnet: str) -> None:
    """Make the bridge, which is the controller's eth0 as well, and connect the host. `controller` is a pid."""
    ip(f"link add eth0 address {_mac(subnet, CONTROLLER)} type bridge", *_configure(subnet, CONTROLLER), pid=controller)
    link = host_link(name)
    ip(
        f"link add {link} address {_mac(subnet, HOST)} type veth peer name host netns {controller}",
        f"address add {subnet}.{HOST}/24 dev {link}",
        f"link set {link} up",
    )
    ip("link set host master eth0 up", pid=controller)


def plug_in(controller: int, node: int, subnet: str, number: int) -> None:
    """Connect node `number`, whose first process is `node`, to the switch."""
    cable = f"link add node{number} type veth peer name eth0 address {_mac(subnet, number)} netns {node}"
    ip(cable, f"link set node{number} master eth0 up", pid=controller)
    ip(*_configure(subnet, number), pid=node)


def unplug(controller: int, number: int) -> None:
    """Cut a node off in the middle of whatever it says."""
    ip(f"link delete node{number}", pid=controller)


def unplug_host(name: str) -> None:
    """Remove the cable to the host at once; the kernel would do it some time after the controller's end."""
    show = ["ip", "link", "show", host_link(name)]
    if subprocess.run(show, capture_output=True, timeout=20).returncode == 0:
        subprocess.run(["ip", "link", "delete", host_link(name)], capture_output=True, timeout=20)


def answers(subnet: str, port: int) -> bool:
    """Whether the controller accepts connections; Slurm's commands take long to find out that it does not."""
    try:
        socket.create_connection((f"{subnet}.{CONTROLLER}", port), timeout=1).close()
    except OSError:
        return False
    return True
