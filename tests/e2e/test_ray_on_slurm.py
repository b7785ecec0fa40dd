"""Ray inside a job on a real Slurm: what a driver sees, how jobs end, and who has no access."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.ray_drivers import COUNT, INTRUDER, LOOK, WAIT
from tests.e2e.workspace import Workspace
from tests.marks import long
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S

pytestmark = pytest.mark.sandbox
LOOK_FOR = (
    "pgrep -fa 'gcs_server|raylet|ray::|hpc_rl[.]node|_driver.py' | grep -v pgrep; find /tmp /dev/shm -xdev -mindepth 1"
)
"""Ray's processes, and files on a node's own disk. Folders that a node shares with others are not entered."""
OTHER = 65534
"""Another user's id."""
TWO_NODES = ["--nodes", "2", "--cpus-per-task", "1", "--mem", "2G", "trainer.device=cpu"]


def make_workspace(folder: Path, environ: dict[str, str]) -> Workspace:
    folder.mkdir()
    programs = {"look_driver.py": LOOK, "wait_driver.py": WAIT, "count_driver.py": COUNT, "intruder.py": INTRUDER}
    for name, text in programs.items():
        (folder / name).write_text(text)
    return Workspace(folder, {**environ, "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"})


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_workspace(slurm_cluster.shared / f"ray-{uuid.uuid4().hex[:8]}", slurm_cluster.env)


@pytest.fixture(scope="module")
def patient_cluster() -> Iterator[Cluster]:
    """A cluster that takes minutes to notice a lost node, as real ones do."""
    yield from sandbox_cluster("patient", nodes=2, cpus=2, memory_mb=6000, slurmd_timeout_s=300)


def traces(cluster: Cluster) -> dict[str, str]:
    """Return Ray's processes and the files on the nodes' own disks, by node."""
    return {node: cluster.exec_on(node, ["sh", "-c", LOOK_FOR]).stdout for node in cluster.nodes}


@pytest.fixture
def nothing_left(slurm_cluster: Cluster) -> Iterator[None]:
    before = traces(slurm_cluster)
    yield
    for job in slurm_cluster.run(["squeue", "--noheader", "--format=%i"]).stdout.split():  # of a failed test
        slurm_cluster.run(["scancel", job])
    slurm_cluster.wait_idle()
    assert traces(slurm_cluster) == before


def start_waiting(workspace: Workspace, name: str, *options: str) -> Path:
    """Submit a job, wait until its driver runs, and return the driver's mark, which contains its address."""
    mark = workspace.folder / f"{name}.mark"
    arguments = [*TWO_NODES, "--job-name", name, *options, "--", "python", "wait_driver.py", str(mark)]
    workspace.ok("submit", "ray", *arguments)
    workspace.wait_until(lambda: mark.exists() or ended(workspace, name), f"{name} to be up")
    assert mark.exists(), workspace.logs()
    return mark


def ended(workspace: Workspace, name: str) -> bool:
    return workspace.status(name)["state"] in ("FAILED", "CANCELLED", "COMPLETED", "NODE_FAIL")


def job_id(workspace: Workspace, name: str) -> str:
    return str(workspace.status(name)["job_id"])


def log_of(workspace: Workspace, name: str) -> str:
    return Path(str(workspace.status(name)["log"])).read_text()


def check_reason_comes_first(log: str, reason: str) -> None:
    assert reason in log, log
    before = log[: log.index(reason)]
    assert not re.search(r"Traceback|Error|error:|SIGTERM", before), log


@pytest.mark.usefixtures("nothing_left")
def test_a_driver_sees_what_was_granted_and_its_exit_code_is_the_jobs(workspace: Workspace) -> None:
    options = ["--job-name", "look", "ray_kwargs.timeline_json_file=timeline.json"]
    proxied = Workspace(workspace.folder, {**workspace.environ, "http_proxy": "http://127.0.0.1:9"})
    program = ["python", "look_driver.py", "a b;$HOME", "--x=1"]
    done = proxied.hpc_rl("submit", "ray", *TWO_NODES, *options, "--follow", "--", *program)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the driver is done" in done.stdout and "the driver failed with exit code 3" in done.stdout
    seen = json.loads((workspace.folder / "seen.json").read_text())
    # The machine has 2 CPUs and more memory than this; the job was granted 1 CPU and 2 GiB on each node.
    assert [node["CPU"] for node in seen["nodes"]] == [1, 1]
    assert all(node["memory"] + node["object_store_memory"] == 2 << 30 for node in seen["nodes"])
    assert all("GPU" not in node for node in seen["nodes"])
    assert sorted(task["node"] for task in seen["tasks"]) == ["node1", "node2"]
    task = seen["tasks"][0]
    assert (task["http_proxy"], seen["proxy"]) == ("http://127.0.0.1:9", "http://127.0.0.1:9")
    assert (task["NCCL_DEBUG"], task["VLLM_LOGGING_LEVEL"], task["RAY_AUTH_MODE"]) == ("INFO", "WARN", "token")
    assert task["TMPDIR"].startswith("/tmp/0.")
    assert seen["arguments"] == ["a b;$HOME", "--x=1"]
    timeline = json.loads((workspace.folder / "timeline.json").read_text())
    assert any(event["name"].endswith("look") for event in timeline)
    attempt = workspace.folder / "runs" / "look" / "attempt-1"
    for node in ("node0", "node1"):
        assert (attempt / "ray" / node / "raylet.out").stat().st_size > 0
    assert (attempt / "ray" / "node0" / "gcs_server.out").exists() and not (attempt / ".ray-token").exists()
    assert "node0-driver: the driver is done" in workspace.ok("logs", "look", "--node", "0")


BREAKS = {
    "raylet": ("node2", ["-x", "raylet"], "Ray's raylet was killed (signal 9) on node node2", 137),
    "gcs": ("node1", ["-x", "gcs_server"], "Ray's GCS server was killed (signal 9) on node node1", 137),
    "driver": (
        "node1",
        ["-f", "^python wait_driver"],
        "the driver failed with exit code 137 (killed (signal 9) by a user or a program, or",
        137,
    ),
    "entry": (
        "node2",
        ["-f", "^[^ ]*python[^ ]* -P -m hpc_rl.node.ray_cluster.node"],
        "the node entry on node node2 was killed",
        137,
    ),
}
"""What is killed -> on which node, how, the message in the log, and the job's exit code."""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("what", [long("raylet"), long("gcs"), "driver", long("entry")])
def test_what_dies_ends_the_job_on_all_nodes(workspace: Workspace, slurm_cluster: Cluster, what: str) -> None:
    node, pattern, reason, code = BREAKS[what]
    start_waiting(workspace, what)
    slurm_cluster.exec_on(node, ["pkill", "-KILL", *pattern], check=True)
    assert slurm_cluster.wait_job(job_id(workspace, what)) == "FAILED"
    log = log_of(workspace, what)
    assert workspace.status(what)["exit_code"] == code, log
    if what == "entry":  # srun reports it too, and either may be first
        assert reason in log
    else:
        check_reason_comes_first(log, reason)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_a_cancelled_job_leaves_nothing(workspace: Workspace, slurm_cluster: Cluster) -> None:
    start_waiting(workspace, "cancelled")
    workspace.ok("cancel", "cancelled")
    assert slurm_cluster.wait_job(job_id(workspace, "cancelled")) == "CANCELLED"
    attempt = workspace.folder / "runs" / "cancelled" / "attempt-1"
    assert (attempt / "ray" / "node1" / "raylet.out").exists()


@pytest.mark.long
def test_a_node_that_is_cut_off_ends_the_job_on_both_sides_before_slurm_knows(patient_cluster: Cluster) -> None:
    workspace = make_workspace(patient_cluster.shared / "lost", patient_cluster.env)
    before = traces(patient_cluster)
    start_waiting(workspace, "lost", "slurm.requeue=false")
    patient_cluster.cut_off("node2")
    patient_cluster.exec_on("node2", ["pkill", "-KILL", "-x", "slurmd"], check=True)
    status = workspace.folder / "runs" / "lost" / "status.json"
    workspace.wait_until(lambda: "FAILED" in status.read_text(), "the job to end")
    workspace.wait_until(lambda: traces(patient_cluster) == before, "both nodes to be empty")
    assert not patient_cluster.node_states()["node2"].startswith("down")
    assert json.loads(status.read_text())["exit_code"] == 1
    assert (status.parent / "attempt-1" / ".lost").read_text() == "node2\n"
    check_reason_comes_first(log_of(workspace, "lost"), "hpc-rl: node node2 is lost: it has not answered for")


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_others_share_the_nodes_and_do_not_get_in(workspace: Workspace, slurm_cluster: Cluster) -> None:
    """Two jobs of one user and one of another share the nodes. Then the other user tries to enter the first job."""
    python = python_of_others()
    address = start_waiting(workspace, "first", "ray.dashboard=true").read_text()
    count = ["--nodes", "1", "--job-name", "second", "--follow", "--", "python", "count_driver.py"]
    assert "nodes: 1 1.0" in workspace.ok("submit", "ray", *TWO_NODES, *count)
    assert "nodes: 1 1.0" in run_as_other(slurm_cluster, python)
    log = log_of(workspace, "first")
    dashboard = re.search(r"ssh -N -L \d+:127\.0\.0\.1:(\d+) -J \S+ node1, then http:", log)
    assert dashboard, log
    attempt = workspace.folder / "runs" / "first" / "attempt-1"
    token = (attempt / ".ray-token").read_text()
    assert (attempt / ".ray-token").stat().st_mode & 0o077 == 0
    assert token not in log and token not in (workspace.folder / "runs/first/job.sbatch").read_text()
    assert token not in slurm_cluster.exec_on("node1", ["ps", "axww"]).stdout
    assignments = [f"{name}={value}" for name, value in environment_of_others().items()]
    for node in ("node1", "node2"):
        scratch = slurm_cluster.exec_on(node, ["sh", "-c", "ls -d /tmp/0.*"]).stdout.strip()
        private = [str(workspace.folder / "runs/first"), str(attempt / ".ray-token"), scratch]
        intrude = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups", "env", *assignments, python]
        arguments = [str(workspace.folder / "intruder.py"), address, dashboard[1], *private]
        done = slurm_cluster.exec_on(node, [*intrude, *arguments], timeout=DEADLINE_S)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found.pop("submit to 127.0.0.1") == (401 if node == "node1" else "refused")
        assert found.pop(f"submit to {address.split(':')[0]}") == "refused"
        assert found.pop("roll call") == ""
        assert [found.pop(f"read {path}") for path in private] == ["PermissionError"] * 3
        assert len(found) == 4 and all("oken" in said or "Failed to connect" in said for said in found.values()), found
    (workspace.folder / "first.end").touch()
    assert slurm_cluster.wait_job(job_id(workspace, "first")) == "COMPLETED"
    assert "nodes at the end: 2" in log_of(workspace, "first")


def python_of_others() -> str:
    """Return a Python that another user can run with this environment's packages."""
    found = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin") or sys.executable
    try:
        probe = [found, "-c", "import ray"]
        subprocess.run(
            probe, env=environment_of_others(), user=OTHER, check=True, capture_output=True, timeout=DEADLINE_S
        )
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"another user cannot run {found} with this environment's packages")
    return found


def environment_of_others() -> dict[str, str]:
    packages = [str(Path(__file__).parents[2]), sysconfig.get_path("purelib")]
    return {"PYTHONPATH": ":".join(packages), "PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def run_as_other(cluster: Cluster, python: str) -> str:
    """Run a job of another user on one node and return its output."""
    folder = cluster.shared / f"other-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "count_driver.py").write_text(COUNT)
    os.chown(folder, OTHER, OTHER)
    environ = {**environment_of_others(), "SLURM_CONF": cluster.env["SLURM_CONF"], "HOME": str(folder)}
    command = ["submit", "ray", *TWO_NODES, "--nodes", "1", "--follow", "--", python, "count_driver.py"]
    done = cluster.run(
        [python, "-m", "hpc_rl.cli", *command],
        timeout=DEADLINE_S, cwd=folder, env=environ, user=OTHER, group=OTHER, extra_groups=[],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
