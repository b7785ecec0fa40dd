"""Ray inside a job on a real Slurm: what a driver sees, how jobs end, and who cannot get in."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import Workspace
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
RAY_PROCESSES = "gcs_server|raylet|ray::|hpc_rl[.]node|[a-z]+_driver.py"
TWO_NODES = ["--nodes", "2", "--cpus-per-task", "1", "--mem", "2G", "trainer.device=cpu"]
START_S = 150
"""Ray starts in 5 to 15 s; the machine that runs the tests may be busy."""

DRIVERS = {
    # Writes down what it sees, runs a task on every node, and leaves with exit code 3.
    "look_driver.py": """
import json, os, pathlib, sys, ray
ray.init()
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def look():
    names = ("http_proxy", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "TMPDIR", "RAY_AUTH_MODE")
    return {"node": os.uname().nodename, **{name: os.environ.get(name) for name in names}}
seen = {"nodes": [node["Resources"] for node in ray.nodes() if node["Alive"]], "proxy": os.environ["http_proxy"]}
seen |= {"tasks": ray.get([look.remote() for _ in range(8)]), "arguments": sys.argv[1:], "loaded": ray.cluster_resources()}
pathlib.Path("seen.json").write_text(json.dumps(seen))
print("the driver is done")
sys.exit(3)
""",
    # Is up, and waits for its end.
    "wait_driver.py": """
import os, pathlib, signal, sys, time, ray
ray.init(logging_level="error")
@ray.remote(num_cpus=1)
def hold():
    time.sleep(600)
held = hold.remote()
mark = pathlib.Path(sys.argv[1])
mark.with_suffix(".partial").write_text(f"{os.getpid()} {os.environ['RAY_ADDRESS']}")
mark.with_suffix(".partial").rename(mark)
while not mark.with_suffix(".end").exists():
    time.sleep(0.1)
""",
}


def make_workspace(folder: Path, environ: dict[str, str]) -> Workspace:
    folder.mkdir()
    for name, text in DRIVERS.items():
        (folder / name).write_text(text)
    return Workspace(folder, {**environ, "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"})


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_workspace(slurm_cluster.shared / f"ray-{uuid.uuid4().hex[:8]}", slurm_cluster.env)


@pytest.fixture(scope="module")
def patient_cluster() -> Iterator[Cluster]:
    """A cluster that, as real ones, takes minutes to find a node lost."""
    yield from sandbox_cluster("patient", nodes=2, cpus=2, memory_mb=6000, slurmd_timeout_s=300)


def traces(cluster: Cluster) -> dict[str, str]:
    """Ray's processes, and files on the nodes' own disks, by node."""
    look = f"pgrep -fa '{RAY_PROCESSES}' | grep -v pgrep; find /tmp /dev/shm -mindepth 1 -maxdepth 1"
    return {node: cluster.exec_on(node, ["sh", "-c", look]).stdout for node in cluster.nodes}


@pytest.fixture
def nothing_left(slurm_cluster: Cluster) -> Iterator[None]:
    before = traces(slurm_cluster)
    yield
    slurm_cluster.wait_idle(60)
    assert traces(slurm_cluster) == before


def start_waiting(workspace: Workspace, name: str, *options: str) -> Path:
    """Submit a job that is up when this returns; its driver's mark, with pid and address."""
    mark = workspace.folder / f"{name}.mark"
    arguments = [*TWO_NODES, "--job-name", name, *options, "--", "python", "wait_driver.py", str(mark)]
    workspace.ok("submit", "ray", *arguments)
    workspace.wait_until(lambda: mark.exists() or ended(workspace, name), f"{name} to be up", START_S)
    assert mark.exists(), workspace.logs()
    return mark


def ended(workspace: Workspace, name: str) -> bool:
    return workspace.status(name)["state"] in ("FAILED", "CANCELLED", "COMPLETED", "NODE_FAIL")


def log_of(workspace: Workspace, name: str) -> str:
    return Path(str(workspace.status(name)["log"])).read_text()


def check_reason_comes_first(log: str, reason: str) -> None:
    assert reason in log, log
    before = log[: log.index(reason)]
    assert not re.search(r"Traceback|Error|error:|SIGTERM", before), log


@pytest.mark.usefixtures("nothing_left")
def test_a_driver_sees_what_was_granted_and_its_exit_code_is_the_jobs(workspace: Workspace) -> None:
    options = ["--job-name", "look", "ray_kwargs.timeline_json_file=timeline.json", "ray.start_timeout_s=140"]
    proxied = Workspace(workspace.folder, {**workspace.environ, "http_proxy": "http://127.0.0.1:9"})
    program = ["python", "look_driver.py", "a b;$HOME", "--x=1"]
    done = proxied.hpc_rl("submit", "ray", *TWO_NODES, *options, "--follow", "--", *program, timeout=180)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the driver is done" in done.stdout and "the driver failed with exit code 3" in done.stdout
    seen = json.loads((workspace.folder / "seen.json").read_text())
    # The machine has 2 CPUs and more memory than this; the job was granted 1 CPU and 2 GiB on each node.
    assert [node["CPU"] for node in seen["nodes"]] == [1, 1]
    assert all(node["memory"] + node["object_store_memory"] == 2 << 30 for node in seen["nodes"])
    assert all("GPU" not in node for node in seen["nodes"])
    assert {task["node"] for task in seen["tasks"]} == {"node1", "node2"}
    task = seen["tasks"][0]
    assert (task["http_proxy"], seen["proxy"]) == (None, "http://127.0.0.1:9")
    assert (task["NCCL_DEBUG"], task["VLLM_LOGGING_LEVEL"], task["RAY_AUTH_MODE"]) == ("INFO", "WARN", "token")
    assert task["TMPDIR"].startswith("/tmp/0.")
    assert seen["arguments"] == ["a b;$HOME", "--x=1"]
    assert "look" in {event["name"] for event in json.loads((workspace.folder / "timeline.json").read_text())}
    attempt = workspace.folder / "runs" / "look" / "attempt-1"
    for node in ("node0", "node1"):
        assert (attempt / "ray" / node / "raylet.out").stat().st_size > 0
    assert (attempt / "ray" / "node0" / "gcs_server.out").exists() and not (attempt / ".ray-token").exists()
    assert "node0-driver: the driver is done" in workspace.ok("logs", "look", "--node", "0")


BREAKS = {
    "raylet": ("node2", ["-x", "raylet"], "Ray's raylet was killed (signal 9) on node node2", 1),
    "gcs": ("node1", ["-x", "gcs_server"], "Ray's GCS server was killed (signal 9) on node node1", 1),
    "driver": ("node1", ["-f", "^python wait_driver"], "the driver failed with exit code 137 (killed, usually for", 137),
    "entry": ("node2", ["-f", "^[^ ]*python[^ ]* -P -m hpc_rl.node.ray_node"], "node node2 is lost", 137),
}
"""What is killed, on which node and how; what the log says, and the job's exit code."""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("what", BREAKS)
def test_what_dies_ends_the_job_on_all_nodes(workspace: Workspace, slurm_cluster: Cluster, what: str) -> None:
    node, pattern, reason, code = BREAKS[what]
    start_waiting(workspace, what)
    slurm_cluster.exec_on(node, ["pkill", "-KILL", *pattern], check=True)
    assert slurm_cluster.wait_job(job_id(workspace, what), timeout=60) == "FAILED"
    log = log_of(workspace, what)
    assert workspace.status(what)["exit_code"] == code, log
    if what == "entry":  # srun says it too, and either may be first
        assert reason in log
    else:
        check_reason_comes_first(log, reason)


@pytest.mark.usefixtures("nothing_left")
def test_a_cancelled_job_leaves_nothing(workspace: Workspace, slurm_cluster: Cluster) -> None:
    start_waiting(workspace, "cancelled")
    workspace.ok("cancel", "cancelled")
    assert slurm_cluster.wait_job(job_id(workspace, "cancelled"), timeout=60) == "CANCELLED"
    attempt = workspace.folder / "runs" / "cancelled" / "attempt-1"
    assert (attempt / "ray" / "node1" / "raylet.out").exists()


def test_a_lost_node_ends_the_job_before_slurm_knows(patient_cluster: Cluster) -> None:
    workspace = make_workspace(patient_cluster.shared / "lost", patient_cluster.env)
    start_waiting(workspace, "lost")
    began = time.monotonic()
    patient_cluster.kill_node("node2", notice=False)
    status = workspace.folder / "runs" / "lost" / "status.json"
    workspace.wait_until(lambda: "FAILED" in status.read_text(), "the job to end", 60)
    assert time.monotonic() - began < 60
    assert json.loads(status.read_text())["exit_code"] == 1
    check_reason_comes_first(log_of(workspace, "lost"), "hpc-rl: node node2 is lost: it has not answered for")
    found = patient_cluster.exec_on("node1", ["sh", "-c", LOOK])
    workspace.wait_until(lambda: not found.stdout, "node1 to be empty", 10)


@pytest.mark.usefixtures("nothing_left")
def test_jobs_of_one_user_and_of_another_share_nodes_and_nobody_else_gets_in(
    workspace: Workspace, slurm_cluster: Cluster
) -> None:
    python = python_of_others()
    theirs = workspace_of(OTHER, slurm_cluster, python)
    mark = start_waiting(workspace, "first", "ray.dashboard=true")
    # One CPU is left on each of both nodes.
    workspace.ok("submit", "ray", *TWO_NODES, "--nodes", "1", "--job-name", "second", "--", "python", "ok_driver.py")
    theirs.ok("submit", "ray", *TWO_NODES, "--nodes", "1", f"slurm.python={python}", "--job-name", "third", "--", python, "ok_driver.py")
