"""Two real clusters with one accounting database, and limits of partitions that only Slurm's controller has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from hpc_rl.run_dir import RunDir
from tests.conftest import sandbox_cluster
from tests.e2e.workspace import Workspace
from tests.marks import long
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import wait_until
from tests.sandbox.spec import Gpus, Shape

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

PROGRAM = ("trainer.device=cpu", "--", "train.py")


@pytest.fixture(scope="module")
def cluster(slurm_tree: str) -> Iterator[Cluster]:
    shapes = (Shape(2, cpus=2, memory_mb=6000, gpus=(Gpus(1, "a100"),)),)
    partitions = {"all": "Default=YES", "single": "MaxNodes=1", "large": "MinNodes=2"}
    yield from sandbox_cluster("pytest-two", shapes=shapes, partitions=partitions, accounting=True, tree=slurm_tree)


@pytest.fixture(scope="module")
def workspace(cluster: Cluster) -> Workspace:
    folder = cluster.shared / "project"
    folder.mkdir()
    (folder / "train.py").touch()
    return Workspace(folder, cluster.env, cluster.login(folder))


@pytest.fixture(scope="module")
def other(cluster: Cluster) -> str:
    """A second cluster: its controller runs beside the first one. Its nodes never start, so that its jobs wait."""
    first = (cluster.base / "etc/slurm.conf").read_text()
    changed = {"ClusterName": "other", "SlurmctldPort": "6827", "StateSaveLocation": f"{cluster.base}/state-other"}
    changed |= {
        "SlurmctldPidFile": f"{cluster.base}/run/other.pid",
        "SlurmctldLogFile": f"{cluster.base}/log/other.log",
    }
    changed["SlurmdPort"] = "6828"
    lines = [line for line in first.splitlines() if line.partition("=")[0] not in changed]
    folder = cluster.base / "etc-other"
    folder.mkdir()
    (cluster.base / "state-other").mkdir()
    (folder / "slurm.conf").write_text("\n".join([*(f"{k}={v}" for k, v in changed.items()), *lines, ""]))
    for file in (cluster.base / "etc").iterdir():
        if file.name not in ("slurm.conf", "hosts") and file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    cluster.exec_on("ctl", ["sacctmgr", "--immediate", "add", "cluster", "other"], check=True)
    conf = str(folder / "slurm.conf")
    cluster.exec_on("ctl", ["slurmctld", "-f", conf], check=True, env={**cluster.env, "SLURM_CONF": conf})
    ask = ["squeue", "--clusters=other"]
    wait_until(lambda: cluster.run(ask).returncode == 0, "the second cluster", 600, lambda: cluster.run(ask).stderr)
    return "other"


@pytest.mark.parametrize("variable", ["SLURM_CLUSTERS", long("SBATCH_CLUSTERS")])
def test_a_job_in_another_cluster_is_found_requeued_and_cancelled_there(
    cluster: Cluster, workspace: Workspace, other: str, variable: str
) -> None:
    name = variable.lower().partition("_")[0]
    there = Workspace(workspace.folder, {**workspace.environ, variable: other}, workspace.login)
    there.ok("submit", "torchrun", "--job-name", name, *PROGRAM)
    run = RunDir(workspace.folder / "runs" / name)
    job = json.loads(run.job.read_text())
    assert job["place"]["cluster"] == other
    shown = cluster.run(["squeue", "-h", f"--clusters={other}", "-o", "%i %j"]).stdout
    assert f"{job['job_id']} {name}" in shown
    assert workspace.status(name)["state"] == "PENDING"  # from a shell without the variable
    assert json.loads(there.ok("status", name, "--json"))["state"] == "PENDING"
    assert "cancelled job" in workspace.ok("cancel", name)
    assert not re.search(rf"^ *{job['job_id']} ", cluster.run(["squeue", "-h", f"--clusters={other}"]).stdout, re.M)
    workspace.ok("requeue", name)
    again = json.loads(run.job.read_text())
    assert again["place"]["cluster"] == other and again["job_id"] != job["job_id"]
    elsewhere = workspace.hpc_rl(
        "submit", "torchrun", "--after", name, "--sbatch", f"clusters={cluster.name}", *PROGRAM
    )
    assert elsewhere.returncode == 2 and f"is in cluster {other}" in elsewhere.stderr
    workspace.ok("submit", "torchrun", "--after", name, "--job-name", f"{name}-next", *PROGRAM)
    assert workspace.status(f"{name}-next")["state"] == "PENDING"
    for one in (f"{name}-next", name):
        workspace.ok("cancel", one)
    unchanged = {
        **workspace.environ,
        "SQUEUE_STATES": "RUNNING",
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_FORMAT": "%N",
    }
    workspace.ok("submit", "torchrun", "--job-name", f"{name}-here", *PROGRAM)
    here = Workspace(workspace.folder, {**unchanged, "SLURM_CLUSTERS": other}, workspace.login)
    state = json.loads(here.ok("status", f"{name}-here", "--json"))["state"]
    assert state in ("PENDING", "RUNNING", "COMPLETED", "COMPLETING")
    assert json.loads((workspace.folder / f"runs/{name}-here/job.json").read_text())["place"]["cluster"] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2", "--partition", "single"], "partition single starts jobs of at most 1 node, and --nodes is 2"),
        (["--partition", "large"], "partition large starts jobs of at least 2 nodes, and --nodes is 1"),
        (["--partition", "single,large"], None),
        (["--nodes", "2", "--partition", "large"], None),
    ],
)
def test_numbers_of_nodes_outside_a_partitions_limits(
    workspace: Workspace, options: list[str], said: str | None
) -> None:
    done = workspace.hpc_rl("submit", "torchrun", "--dry-run", *options, *PROGRAM)
    assert done.returncode == (2 if said else 0) and (said or "") in done.stderr, done.stderr


def test_slurm_distinguishes_the_capital_letters_of_a_gpu_type(cluster: Cluster, workspace: Workspace) -> None:
    refused = cluster.run(["sbatch", "--test-only", "--gres=gpu:A100:1", "--wrap", "true"], cwd=cluster.shared)
    assert refused.returncode != 0
    done = workspace.hpc_rl(
        "submit", "torchrun", "--dry-run", "slurm.gpu_type=A100", "--gpus-per-node", "1", "--", "train.py"
    )
    assert done.returncode == 2 and "write slurm.gpu_type=a100" in done.stderr


def test_a_job_that_waits_for_ever_is_explained(cluster: Cluster, workspace: Workspace) -> None:
    workspace.ok("render", "torchrun", "--job-name", "stuck", "--nodes", "2", *PROGRAM)
    script = workspace.folder / "runs/stuck/job.sbatch"
    script.write_text(script.read_text().replace("#!/bin/bash\n", "#!/bin/bash\n#SBATCH --partition=single\n", 1))
    workspace.ok("submit", "torchrun", "--script", str(script))
    wait_until(lambda: workspace.status("stuck")["reason"] == "PartitionNodeLimit", "the reason", 600)
    assert "it will not start by waiting: PartitionNodeLimit: it requests more or fewer" in workspace.ok(
        "explain", "stuck"
    )
    workspace.ok("cancel", "stuck")


def test_a_log_that_a_node_cannot_open_is_the_reason(cluster: Cluster, workspace: Workspace) -> None:
    queued = cluster.run(
        ["sbatch", "--parsable", "--output=/proc/nowhere/job.log", "--wrap", "true"], cwd=cluster.shared, check=True
    )
    cluster.wait_job(queued.stdout.strip())
    from hpc_rl.slurm.states import NOT_STARTED, read_scontrol

    text = cluster.run(["scontrol", "show", "job", "-o", queued.stdout.strip()]).stdout
    found = read_scontrol(text)
    assert found is not None and (found.exit_code, found.reason) == (1, NOT_STARTED), text
