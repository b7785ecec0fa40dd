"""Attempts of another user over the network, on real nodes: the table ATTEMPTS of tests/security/network_intruder.py.

They are made against one running SFT job and one running PPO job, on a node of the job and from another node. The jobs
start while the intruder holds ports on all nodes, and they end as if nobody had been there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.test_ppo_on_slurm import PPO, REWARD
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster
from tests.security.network_intruder import ATTEMPTS, OCCUPIED, SLURM

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
INTRUDER = [sys.executable, "-m", "tests.security.network_intruder"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    folder = slurm_cluster.shared / f"security-{uuid.uuid4().hex[:8]}"
    workspace = make_workspace(folder, slurm_cluster.env)
    make_tiny_model(folder / "policy", hidden=64, layers=2)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (folder / "reward.py").write_text(REWARD)
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
    own = cluster.exec_on("node1", ["ss", "-Htlnp"], check=True).stdout.splitlines()
    local = [(line.split()[3].rsplit(":", 1)) for line in own if '"' in line]
    here = sorted({(host, int(port)) for host, port in local if int(port) not in (*SLURM, *OCCUPIED)})
    on_interface = ",".join(str(port) for host, port in here if host != "127.0.0.1")
    on_loopback = ",".join(str(port) for host, port in here if host in ("127.0.0.1", "0.0.0.0", "*"))
    calls = [("node1", address, on_interface), ("node1", "127.0.0.1", on_loopback), ("node4", address, "-")]
    with ThreadPoolExecutor(len(calls)) as pool:
        return [
            line
            for lines in pool.map(lambda call: one_attack(cluster, *call, run, mark, auth), calls)
            for line in lines
        ]


def one_attack(
    cluster: Cluster, node: str, host: str, ports: str, run: Path, mark: Path, auth: dict[str, str]
) -> list[str]:
    command = ["env", f"--chdir={ROOT}", *INTRUDER, "0", host, ports, str(run), str(mark)]
    done = cluster.exec_on(node, command, env={**cluster.env, **auth})
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {what.__name__ for what in ATTEMPTS} <= {one[0] for one in made}, done.stdout + done.stderr
    return [f"{node} -> {host}: {one[0]} reached {one[1]}" for one in made if one[0] != "ports" and one[1] is not None]


def test_there_are_enough_attempts() -> None:
    assert len(ATTEMPTS) >= 20


@pytest.mark.usefixtures("occupied_ports")
def test_nobody_gets_into_a_fine_tuning_job(workspace: Workspace, slurm_cluster: Cluster) -> None:
    steps = "trainer.total_training_steps=6"
    held = [*QUICK, steps, *workspace.hold_at(3)]
    workspace.ok("submit", "sft", "--nodes", "2", "--sbatch", "nodelist=node[1-2]", "--job-name", "attacked", *held)
    workspace.ok("submit", "sft", "--nodes", "2", "--wait", "--job-name", "quiet", *QUICK, steps)
    workspace.wait_for_step("attacked", 3)
    run, mark = workspace.folder / "runs" / "attacked", slurm_cluster.shared / "mark-sft"
    assert attack(slurm_cluster, run, mark) == []
    workspace.release("attacked")
    workspace.wait_until(lambda: workspace.status("attacked")["state"] == "COMPLETED", "the end of the attacked run")
    assert workspace.losses("attacked") == workspace.losses("quiet")


@pytest.mark.usefixtures("occupied_ports")
def test_nobody_gets_into_a_ppo_job(workspace: Workspace, slurm_cluster: Cluster) -> None:
    options = ["--nodes", "2", "--sbatch", "nodelist=node[1-2]", "--mem", "4G", "--job-name", "ppo", *PPO]
    more = ["model.path=policy", "ray.dashboard=true", "trainer.total_training_steps=100000"]
    workspace.ok("submit", "ppo", *options, *more)
    metrics = workspace.folder / "runs" / "ppo" / "metrics.jsonl"

    def step() -> int:
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return max((int(record["step"]) for record in records if "critic/score/mean" in record), default=0)

    workspace.wait_until(lambda: step() >= 2, "2 steps")
    mark = slurm_cluster.shared / "mark-ppo"
    found = attack(slurm_cluster, metrics.parent, mark, RAY_AUTH_MODE="disabled")
    reached = step()
    workspace.wait_until(lambda: step() >= reached + 2, "2 more steps")
    workspace.ok("stop", "ppo")
    workspace.wait_until(lambda: workspace.status("ppo")["state"] == "STOPPED", "stopped")
    assert (workspace.status("ppo")["attempt"], found) == (1, [])
