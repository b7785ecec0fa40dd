"""The parts of a Ray node: ports, environment, address and logs."""

import os
import re
import socket
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.node import network
from hpc_rl.node.causes import End
from hpc_rl.node.entry import worker_defaults
from hpc_rl.node.ray_cluster.environment import driver_environment, ray_environment, shared_environment
from hpc_rl.node.ray_cluster.head import Driver, Head
from hpc_rl.node.ray_cluster.layout import SOCKET_BYTES, node_address, socket_bytes, with_room_for_sockets
from hpc_rl.node.ray_cluster.node import LOG_FILE_BYTES, copy_logs
from hpc_rl.node.ray_cluster.ports import BLOCK_SIZE, BLOCKS, RayPorts, reserve
from hpc_rl.node.ray_cluster.processes import last_words
from hpc_rl.node.ray_cluster.watch import JobEnd
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.software.proxies import proxies


def environment(environ: dict[str, str], timeline: bool = False) -> dict[str, str]:
    paths = {"token": Path("/run/.ray-token"), "scratch": Path("/tmp/0.7.0"), "temp_dir": Path("/tmp/0.7.0/ray")}
    return shared_environment(
        environ, worker_defaults("cuda", "ib0", None, 4), timeline=timeline, start_timeout_s=300, **paths
    )


def test_every_port_is_in_a_block_and_used_once() -> None:
    ports = RayPorts((20000, 14000, 30000))
    used = [ports.gcs, ports.roll_call, ports.dashboard, *ports.services(dashboard=True).values()]
    assert len({*used, *ports.workers}) == len(used) + len(ports.workers)
    assert all(20000 < port < 20000 + BLOCK_SIZE for port in used)
    assert ports.workers == [*range(14001, 14000 + BLOCK_SIZE), *range(30001, 30000 + BLOCK_SIZE)]
    assert sorted(ports.services(dashboard=False).values())[:3] == [0, 0, 0]


def test_two_jobs_never_get_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_shuffled", list)  # both look in the same places
    with reserve(None, 0) as first, reserve(None, 0) as second:
        assert len(first.firsts) == len(second.firsts) == BLOCKS
        assert not set(first.firsts) & set(second.firsts)
    with reserve(None, 0) as again:
        assert again.firsts == first.firsts


def test_the_places_are_random() -> None:
    with reserve(None, 0) as first:
        pass
    with reserve(None, 0) as second:
        assert first.firsts != second.firsts


def test_many_listening_sockets_of_others_do_not_defeat_the_search() -> None:
    with ExitStack() as others:
        for port in range(12000, 32768, 50):  # no 50 ports in a row are free
            taken = others.enter_context(socket.socket())
            with suppress(OSError):
                taken.bind(("127.0.0.1", port))
                taken.listen()
        with reserve(None, 0) as found:
            assert len(found.firsts) == BLOCKS
            assert not [first for first in found.firsts if any(p % 50 == 12000 % 50 for p in around(first))]


def around(first: int) -> range:
    return range(first, first + BLOCK_SIZE)


def test_if_nearly_all_ports_are_taken_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_shuffled", lambda numbers: list(numbers)[: BLOCKS - 1])
    with pytest.raises(UserError, match="no 512 free TCP ports in blocks of 16 between 12000 and"):
        reserve(None, 0)


def test_configured_ports_that_are_taken_are_refused() -> None:
    size = BLOCKS * BLOCK_SIZE
    start = free_start(2 * size) + size
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", start + 100))
        taken.listen()
        with pytest.raises(UserError, match=rf"\(ray\.first_port\) are occupied on .* uses port {start + 100}"):
            reserve(start, 0)
    with reserve(start - size, 1) as wanted:  # the second node on this machine
        assert wanted.firsts == tuple(range(start, start + size, BLOCK_SIZE))
    with pytest.raises(UserError, match="the highest port is 65535"):
        reserve(65000, 1)


def free_start(count: int) -> int:
    """Return the first of as many ports that nobody uses now, below those that hpc-rl chooses from."""
    for first in range(2000, 10_000 - count, count):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("", port))
            return first
    raise AssertionError("no free ports")


def test_what_the_user_exported_wins_but_for_the_token() -> None:
    user = {"NCCL_DEBUG": "INFO", "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "mine", "RAY_ADDRESS": "1.2.3.4:6379"}
    found = environment({**user, "TMPDIR": "/elsewhere"})
    assert found["NCCL_DEBUG"] == "INFO" and found["OMP_NUM_THREADS"] == "4"
    assert "NCCL_SOCKET_IFNAME" not in found and "NCCL_CUMEM_ENABLE" not in found
    assert found["VLLM_LOGGING_LEVEL"] == "WARN" and found["GLOO_SOCKET_IFNAME"] == "ib0"
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/.ray-token")
    assert found["TMPDIR"] == "/tmp/0.7.0" and "RAY_PROFILING" not in found
    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS"} & found.keys()
    assert environment({}, timeline=True)["RAY_PROFILING"] == "1"


def test_rays_workers_are_not_nicer_than_other_processes_unless_the_user_says_so() -> None:
    assert environment({})["RAY_worker_niceness"] == "0"
    assert environment({"RAY_worker_niceness": "5"})["RAY_worker_niceness"] == "5"


def test_rays_own_limits_are_that_of_the_job_unless_the_user_says_so() -> None:
    found = environment({"RAY_worker_register_timeout_seconds": "7"})
    assert (found["RAY_agent_register_timeout_ms"], found["RAY_worker_register_timeout_seconds"]) == ("300000", "7")
    assert environment({})["RAY_worker_register_timeout_seconds"] == "300"


def test_the_end_of_rays_own_log_is_that_of_its_newest_start(tmp_path: Path) -> None:
    for number, (file, text) in enumerate(
        [("raylet.out", "a"), ("raylet.2.out", "c"), ("raylet.1.out", "b"), ("raylet_client.out", "x")]
    ):
        path = tmp_path / "session_2026-01-01_a" / "logs" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (number, number))
    assert last_words(tmp_path, "raylet") == "hpc-rl: the end of Ray's raylet.1.out:\n    b\n"


def test_the_end_of_rays_own_log_is_that_of_the_newest_session(tmp_path: Path) -> None:
    assert last_words(tmp_path, "raylet") == ""
    for number, session in enumerate(("session_2026-01-01_b", "session_2026-01-01_a"), 1):
        logs = tmp_path / session / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text("".join(f"line {line} of {session}\n" for line in range(1, 9)))
        stack = "*** StackTrace Information ***\n/lib/ray/raylet(+0x8bd16b) [0x55783ebba16b] boost::run()\n"
        usual = "\n[2026-01-01 13:20:01,904 I 1 1] all is well\n[state-dump] a counter\n"
        (logs / "raylet.out").write_text(usual + stack)
        os.utime(logs, (number, number))
    lines = [f"    line {line} of session_2026-01-01_a\n" for line in range(3, 9)]
    assert last_words(tmp_path, "raylet") == "hpc-rl: the end of Ray's raylet.err:\n" + "".join(lines)


def test_the_driver_keeps_the_proxies_that_ray_does_not_get() -> None:
    shared = environment({"https_proxy": "http://proxy:3128", "HTTP_PROXY": "x", "no_proxy": "here", "PATH": "/bin"})
    assert {"https_proxy", "HTTP_PROXY", "no_proxy"} & ray_environment(shared).keys() == {"no_proxy"}
    assert proxies(ray_environment(shared)) == {"https": "http://proxy:3128", "http": "x"}
    driver = driver_environment(shared, "10.0.0.1:20001", Path("/venv/bin/python"))
    assert driver["https_proxy"] == "http://proxy:3128"
    assert (driver["RAY_ADDRESS"], driver["PATH"]) == ("10.0.0.1:20001", "/venv/bin:/bin")


def test_nodes_on_one_machine_have_addresses_of_their_own() -> None:
    nodes = ("here",) * 300
    found = [node_address(Allocation("7", 0, nodes, rank, 1), None)[1] for rank in (0, 1, 299)]
    assert found == ["127.0.0.2", "127.0.0.3", "127.0.1.51"]


@pytest.mark.parametrize("dashboard", [False, True])
def test_without_room_for_sockets_the_temporary_folder_is_in_tmp(
    capsys: pytest.CaptureFixture[str], dashboard: bool
) -> None:
    """The longest name has a user id of 10 digits, a job id of 8, and 6 more characters. It fits below /tmp."""
    name, session = "4294967294.12345678.abcdef", "session_2026-01-02_03-04-05_678901_1234567"
    longest = len(f"/tmp/{name}/ray/{session}/sockets/{'dash_TaskEventsHead' if dashboard else 'plasma_store'}")
    assert socket_bytes(Path("/tmp") / name, dashboard) == longest <= SOCKET_BYTES == 107
    room = len("/tmp") + SOCKET_BYTES - longest
    environ = {"TMPDIR": "/scratch", "HOME": "/"}
    fits, too_long = (Path("/" + "x" * (length - 1)) / name for length in (room, room + 1))
    assert with_room_for_sockets(environ, fits, "node1", dashboard) == environ
    assert capsys.readouterr().out == ""
    assert with_room_for_sockets(environ, too_long, "node1", dashboard) == {"TMPDIR": "/tmp", "HOME": "/"}
    said = "hpc-rl: node node1: Ray's files are in /tmp, because the paths of its sockets would have 108 bytes below TM"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(said)


def test_the_longest_socket_of_ray_is_known() -> None:
    """A new module of Ray's dashboard may have a longer name, which is part of its socket's path."""
    ray = Path(find_spec("ray").origin).parent  # type: ignore[arg-type, union-attr]
    modules = [
        match[1]
        for file in (ray / "dashboard/modules").rglob("*.py")
        for match in re.finditer(r"^class (\w+)\(SubprocessModule", file.read_text(), re.MULTILINE)
    ]
    assert modules and max(map(len, modules)) <= len("TaskEventsHead")


def test_ends_of_text_logs_are_copied(tmp_path: Path) -> None:
    logs = tmp_path / "ray/session_2026-01-01_00-00-00_000000_1/logs"
    (logs / "old").mkdir(parents=True)
    (logs / "raylet.out").write_text("up\n")
    (logs / "worker-1.err").write_text("x" * (LOG_FILE_BYTES + 7))
    (logs / "empty.log").touch()
    (logs / "core.bin").write_bytes(b"\0")
    copy_logs(tmp_path / "ray", tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"raylet.out", "worker-1.err"}
    assert (tmp_path / "copy/worker-1.err").read_text().startswith("[the first 7 bytes are left out]\nx")
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0


def test_what_happens_during_the_timeline_does_not_replace_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_head: Head, _path: Path) -> None:
        raise JobEnd(1, "the GCS ended")

    monkeypatch.setattr(Head, "_gather", lambda *_: None)
    monkeypatch.setattr(Head, "_run_driver", lambda *_: End(0, 0))
    monkeypatch.setattr(Head, "_write_timeline", fail)
    head: Any = object.__new__(Head)
    head._watch = SimpleNamespace(ray=SimpleNamespace(begin=lambda _: None))
    head._layout = SimpleNamespace(address="a", ports=SimpleNamespace(gcs=1), start_options=lambda *_: None)
    head._driver = Driver((), {}, Path("timeline.json"), dashboard=False)
    assert head.run() == End(0, 0)
