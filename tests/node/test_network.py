import socket
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.node import network
from hpc_rl.node.network import addresses_of, choose_address, free_port, interface_addresses, with_usable_interfaces


def test_a_job_on_one_node_stays_on_the_loopback() -> None:
    assert choose_address(None, None) == ("lo", "127.0.0.1")


def test_a_configured_interface_is_taken_or_refused_with_what_there_is() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert choose_address("lo", "peer") == ("lo", "127.0.0.1")
    with pytest.raises(UserError, match=r"interface ib7 has no IPv4 address.*lo \(127\.0\.0\.1\)"):
        choose_address("ib7", "peer")


def test_a_peer_that_only_resolves_to_the_loopback_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_: found)
    monkeypatch.setattr(network, "_ANYWHERE", "127.0.0.1")  # no default route
    with pytest.raises(UserError, match=r"no route from .* to node peer: it resolves to 127\.0\.1\.1; interfaces"):
        choose_address(None, "peer")


def test_an_unknown_peer_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_ANYWHERE", "127.0.0.1")
    with pytest.raises(UserError, match=r"its name does not resolve, and Slurm gives no address.*set slurm\.interface"):
        choose_address(None, "no-such-host.invalid")


@pytest.mark.parametrize("by", ["scontrol", "default route"])
def test_a_peer_that_nothing_but_slurm_resolves_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    own = next(
        ((name, one) for name, one in interface_addresses().items() if not one.startswith(("127.", "169."))), None
    )
    if own is None:
        pytest.skip("this machine has only a loopback")
    monkeypatch.setattr(network, "_ANYWHERE", own[1] if by == "default route" else "127.0.0.1")
    scontrol = tmp_path / "scontrol"
    answer = f"NodeName=gpu7 Arch=x86_64 NodeAddr={own[1]} NodeHostName=gpu7" if by == "scontrol" else ""
    scontrol.write_text(f'#!/bin/sh\necho >> "$0.calls"\n[ "$*" = "show node -o gpu7.invalid" ] && echo "{answer}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert choose_address(None, "gpu7.invalid") == own
    assert (tmp_path / "scontrol.calls").read_text() == "\n", "it is asked once"


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port("127.0.0.1")
    assert 12000 <= first < 32768
    monkeypatch.setattr(network, "_shuffled", lambda _: [first, first + 1, first + 2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert free_port("127.0.0.1") != first


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "range").write_text("32768 60999\n")
    monkeypatch.setattr(network, "_EPHEMERAL_RANGE", tmp_path / "range")
    monkeypatch.setattr(network, "_shuffled", lambda _: [])
    with pytest.raises(UserError, match="no free TCP port between 12000 and 32767"):
        free_port("127.0.0.1")


@pytest.mark.parametrize(
    ("variable", "value", "kept"),
    [
        ("GLOO_SOCKET_IFNAME", "^lo,docker0", False),  # NCCL's syntax
        ("GLOO_SOCKET_IFNAME", "=ib0", False),
        ("GLOO_SOCKET_IFNAME", "ib", False),
        ("GLOO_SOCKET_IFNAME", "", False),
        ("GLOO_SOCKET_IFNAME", "eth9", False),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),
        ("TP_SOCKET_IFNAME", "^lo", False),
        ("CCL_KVS_IFACE", "ib", False),
        ("CCL_KVS_IFACE", "ib0", True),
        ("NCCL_SOCKET_IFNAME", "^lo,docker0", True),
        ("NCCL_SOCKET_IFNAME", "^lo,ib,eth", False),
        ("NCCL_SOCKET_IFNAME", "^=lo,ib,eth", True),
        ("NCCL_SOCKET_IFNAME", "=ib0", True),
        ("NCCL_SOCKET_IFNAME", "=ib", False),
        ("NCCL_SOCKET_IFNAME", "ib,hsn", True),
        ("NCCL_SOCKET_IFNAME", "hsn", False),
        ("HCCL_SOCKET_IFNAME", "=hsn0", False),
        ("OTHER_IFNAME", "^lo", True),
    ],
)
def test_names_of_interfaces_that_cannot_work_are_replaced(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kept: bool
) -> None:
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth0")])
    found, said = with_usable_interfaces({variable: value, "PATH": "/bin"}, "ib0")
    assert found == ({variable: value, "PATH": "/bin"} if kept else {"PATH": "/bin"})
    assert [line.partition(" ")[0] for line in said] == ([] if kept else [f"{variable}={value}"])
    assert kept or said[0].endswith("ib0 is used" if variable.startswith("GLOO") else "it is removed")


def test_addresses_of_names_that_nobody_knows_are_left_out() -> None:
    assert addresses_of(["localhost", "no-such-host.invalid", "localhost"]) == ["127.0.0.1"]
