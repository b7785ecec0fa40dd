"""Attempts of another user over the network, on real nodes: the table ATTEMPTS of tests/security/network_intruder.py.

They are made against one running SFT job and one running PPO job, on a node of the job and from another node. The jobs
start while the intruder holds ports on all nodes, and they end as if nobody had been there.
"""

from __future__ import annotations

import http.server
import json
import pickle
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.e2e.test_ppo_on_slurm import PPO, REWARD
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S
from tests.security import network_intruder, test_files, test_jobs_on_slurm
from tests.security.network_intruder import (
    ATTEMPTS,
    OCCUPIED,
    SERVICES,
    SLURM,
    Target,
    attempt,
    call_rays_services,
    find_a_tcp_store,
    join_as_a_rank,
    read_config,
    send_pickles,
    use_http,
    use_the_control_store,
    write_stop_file,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.security
INTRUDER = [sys.executable, "-m", "tests.security.network_intruder"]
SLOW_REWARD = "import time\n\n" + REWARD.replace("    text =", "    time.sleep(0.2)\n    text =")
"""Slow, so that the intruder gets processor time while the job waits for rewards."""


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    folder = slurm_cluster.shared / f"security-{uuid.uuid4().hex[:8]}"
    workspace = make_workspace(folder, slurm_cluster.env)
    make_tiny_model(folder / "policy", hidden=64, layers=2)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (folder / "reward.py").write_text(SLOW_REWARD)
    return workspace


@pytest.fixture
def occupied_ports(slurm_cluster: Cluster) -> Iterator[None]:
    """The intruder listens on 415 ports of each node, so that nowhere 50 ports in a row are free."""
    with ExitStack() as held:
        for node in slurm_cluster.nodes:
            command = [*slurm_cluster._enter(node), "env", f"--chdir={ROOT}", *INTRUDER, "occupy"]
            holder = subprocess.Popen(
                command, env=slurm_cluster.env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            held.callback(holder.kill)
            held.enter_context(holder)
            assert holder.stdout and holder.stdout.readline() == "occupied\n"
        yield


def attack(cluster: Cluster, run: Path, mark: Path, **auth: str) -> list[str]:
    """Make all attempts against the job on node1, from there and from node4. Return what they have reached."""
    address = cluster.exec_on("node1", ["hostname", "--all-ip-addresses"], check=True).stdout.split()[0]
    here = listeners(cluster)
    on_interface = ",".join(str(port) for host, port in here if host != "127.0.0.1")
    on_loopback = ",".join(str(port) for host, port in here if host in ("127.0.0.1", "0.0.0.0", "*"))
    calls = [("node1", address, on_interface), ("node1", "127.0.0.1", on_loopback), ("node4", address, on_interface)]
    with ThreadPoolExecutor(len(calls)) as pool:
        return [
            line
            for lines in pool.map(lambda call: one_attack(cluster, *call, run, mark, auth), calls)
            for line in lines
        ]


def listeners(cluster: Cluster) -> list[tuple[str, int]]:
    """Return the addresses and ports at which the processes of the job on node1 listen.

    Slurm's own programs are left out: garbage can end the srun of Slurm 22.05.
    """
    own = cluster.exec_on("node1", ["ss", "-Htlnp"], check=True).stdout.splitlines()
    local = [line.split()[3].rsplit(":", 1) for line in own if '"' in line and '"srun"' not in line]
    return sorted({(host, int(port)) for host, port in local if int(port) not in (*SLURM, *OCCUPIED)})


def one_attack(
    cluster: Cluster, node: str, host: str, ports: str, run: Path, mark: Path, auth: dict[str, str], *names: str
) -> list[str]:
    command = ["env", f"--chdir={ROOT}", *INTRUDER, "0", host, ports, str(run), str(mark), *names]
    done = cluster.exec_on(node, command, env={**cluster.env, **auth})
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert set(names or [what.__name__ for what in ATTEMPTS]) <= {one[0] for one in made}, done.stdout + done.stderr
    return [f"{node} -> {host}: {one[0]} reached {one[1]}" for one in made if one[0] != "ports" and one[1] is not None]


def test_there_are_enough_attempts() -> None:
    """docs/security.md has these numbers."""
    numbers = (len(ATTEMPTS), len(test_jobs_on_slurm.ATTEMPTS), len(test_files.ATTEMPTS))
    assert numbers == (26, 24, 46) and sum(numbers) >= 40


RANK_0 = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=2)
"""


class Trusting(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"jobs")

    def log_message(self, *_: object) -> None:
        pass


def test_attempts_succeed_where_nothing_is_protected(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    target = Target(0, "127.0.0.1", (store.port,), tmp_path, tmp_path / "mark")
    assert attempt(find_a_tcp_store, target)
    (tmp_path / "config.yaml").write_text("secret: 1")
    assert attempt(read_config, target) == "secret: 1"
    assert attempt(write_stop_file, target)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: pickle.loads(server.accept()[0].recv(1000)))
        reached = attempt(send_pickles, replace(target, ports=(server.getsockname()[1],)))
        assert read.result(600) == 0 and reached == f"created {target.mark}"
    target.mark.unlink()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trusting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert attempt(use_http, replace(target, ports=(server.server_port,)))
        server.shutdown()


def test_torchs_own_rendezvous_lets_a_stranger_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_intruder, "BRIEF", timedelta(seconds=DEADLINE_S))
    monkeypatch.setattr(network_intruder, "ATTEMPT_S", int(DEADLINE_S))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    rank = subprocess.Popen([sys.executable, "-c", RANK_0, address])
    target = Target(0, "127.0.0.1", (port,), tmp_path, tmp_path / "mark")
    try:
        assert attempt(join_as_a_rank, target) == address
    finally:
        rank.kill()
        rank.wait(600)


@pytest.mark.long
@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.usefixtures("occupied_ports")
def test_nobody_gets_into_a_fine_tuning_job(workspace: Workspace, slurm_cluster: Cluster) -> None:
    steps = "trainer.total_training_steps=6"
    held = [*QUICK, steps, *workspace.hold_at(3)]
    workspace.ok("submit", "sft", "--nodes", "2", "--sbatch", "nodelist=node[1-2]", "--job-name", "attacked", *held)
    workspace.ok("submit", "sft", "--nodes", "2", "--wait", "--job-name", "quiet", *QUICK, steps)
    workspace.wait_for_step("attacked", 3)
    run, mark = workspace.folder / "runs" / "attacked", slurm_cluster.shared / "mark-sft"
    address = slurm_cluster.exec_on("node1", ["hostname", "--all-ip-addresses"], check=True).stdout.split()[0]
    assert {host for host, _ in listeners(slurm_cluster)} == {address}  # gloo and the roll call
    assert attack(slurm_cluster, run, mark) == []
    workspace.release("attacked")
    workspace.wait_until(lambda: workspace.status("attacked")["state"] == "COMPLETED", "the end of the attacked run")
    assert workspace.losses("attacked") == workspace.losses("quiet")


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.usefixtures("occupied_ports")
def test_nobody_gets_into_a_ppo_job(workspace: Workspace, slurm_cluster: Cluster) -> None:
    options = ["--nodes", "2", "--sbatch", "nodelist=node[1-2]", "--mem", "4G", "--job-name", "ppo", *PPO]
    more = ["model.path=policy", "ray.dashboard=true", "trainer.total_training_steps=100000"]
    workspace.ok("submit", "ppo", *options, *more)
    metrics = workspace.folder / "runs" / "ppo" / "metrics.jsonl"

    def step() -> int:
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return max((int(record["step"]) for record in records if "critic/score/mean" in record), default=0)

    workspace.wait_until(lambda: step() >= 1, "a step")
    mark = slurm_cluster.shared / "mark-ppo"
    found = attack(slurm_cluster, metrics.parent, mark, RAY_AUTH_MODE="disabled")
    reached = step()
    host, port = (metrics.parent / "attempt-1" / ".rendezvous").read_text().split(":")
    token = (metrics.parent / "attempt-1" / ".ray-token").read_text()
    services = ",".join(str(port) for address, port in listeners(slurm_cluster) if address != "127.0.0.1")
    for given, opens in (("0" * 64, False), (token, True)):  # only the token makes the difference
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": given}
        store, called = (
            " ".join(one_attack(slurm_cluster, "node4", host, ports, metrics.parent, mark, auth, what.__name__))
            for what, ports in ((use_the_control_store, port), (call_rays_services, services))
        )
        assert bool(store) == opens, store
        assert {service for service in SERVICES if service in called} == (set(SERVICES) if opens else set()), called
    workspace.wait_until(lambda: step() >= reached + 1, "another step")
    workspace.ok("stop", "ppo")
    workspace.wait_until(lambda: workspace.status("ppo")["state"] == "STOPPED", "stopped")
    assert (workspace.status("ppo")["attempt"], found) == (1, [])
