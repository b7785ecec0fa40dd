"""Full disks under jobs on real nodes: the run directory's, and the temporary folder's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import SMALL_PPO, left_behind, measured, workspace_on
from tests.faults.outcomes import Outcome
from tests.sandbox.cluster import Cluster
from tests.small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.sandbox, pytest.mark.faults]
SAVES = ("trainer.save_freq=1", "trainer.total_training_steps=400", "trainer.test_freq=0", "trainer.export=false")


@pytest.fixture(scope="module")
def disk() -> Iterator[SmallDisk]:
    """A disk that the nodes see too: it is mounted before they start."""
    with small_disk(
        Path(tempfile.mkdtemp(dir="/var/tmp", prefix="hpc-rl-")) / "disk", size="64m", inodes=5000
    ) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(disk: SmallDisk, slurm_tree: str) -> Iterator[Cluster]:
    yield from sandbox_cluster("pytest-disks", nodes=2, cpus=2, memory_mb=6000, tree=slurm_tree)


@pytest.fixture(scope="module")
def workspace(cluster: Cluster) -> Workspace:
    return workspace_on(cluster, "disks")


@pytest.fixture(autouse=True)
def free(disk: SmallDisk) -> Iterator[None]:
    """Free the space and the inodes that a test has used."""
    yield
    disk.free()


@pytest.mark.parametrize("exhaust", [SmallDisk.fill, SmallDisk.use_all_inodes], ids=["full disk", "no inodes"])
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_the_disk_of_the_run_directory_fills_up(
    workspace: Workspace,
    cluster: Cluster,
    disk: SmallDisk,
    job: Literal["sft", "ppo"],
    exhaust: Callable[[SmallDisk], None],
    observed: Callable[[Outcome], None],
) -> None:
    run = disk.path / f"{job}-{exhaust.__name__}"
    options = [*(QUICK if job == "sft" else SMALL_PPO), *SAVES]
    command = ["submit", job, "--nodes", "2", "--mem", "4G", "--run-dir", str(run), *options]
    workspace.ok(*command)
    workspace.wait_until(lambda: max(dict(measured(run)), default=0) >= 3, "3 steps")
    exhaust(disk)
    workspace.wait_until(lambda: workspace.status(str(run))["state"] == "FAILED", "the job failed")
    log = "".join(path.read_text() for path in sorted(run.glob("job-*.log")))
    assert workspace.status(str(run))["exit_code"] == 1, log
    left_behind(cluster, run)
    for view in ("status", "explain"):
        assert "No space left on device" in workspace.ok(view, str(run))
    assert f"file system {disk.path} (tmpfs) has" in workspace.ok("status", str(run))
    exhaust(disk)  # the job has removed what it had written of the last checkpoint
    refused = workspace.hpc_rl(*command)
    assert refused.returncode == 2 and "is not writable" in refused.stderr and "Traceback" not in refused.stderr
    disk.free()
    before = dict(measured(run))
    saved = max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-????????"))
    last = saved + 2
    workspace.ok(*command, f"trainer.total_training_steps={last}", "--wait")
    after = dict(measured(run))
    assert sorted(after) == list(range(1, last + 1))
    lost = max(before) - saved
    fault = "full disk of the run directory" if exhaust is SmallDisk.fill else "no free inodes for the run directory"
    left = left_behind(cluster, run)
    observed(Outcome(fault, job, None, "No space left on device", "exit code 1; resumed", lost, left))


@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_the_temporary_folder_of_a_node_is_full_at_the_start(
    workspace: Workspace,
    cluster: Cluster,
    disk: SmallDisk,
    job: Literal["sft", "ppo"],
    observed: Callable[[Outcome], None],
) -> None:
    disk.fill()
    options = [
        *(QUICK if job == "sft" else SMALL_PPO),
        f"slurm.env.TMPDIR={disk.path}",
        "trainer.total_training_steps=1",
    ]
    ended = workspace.hpc_rl(
        "submit", job, "--nodes", "1", "--mem", "4G", "--job-name", f"tmp-{job}", "--wait", *options
    )
    disk.free()
    assert ended.returncode == 2, ended.stdout + ended.stderr
    message = next(line for line in workspace.ok("logs", f"tmp-{job}").splitlines() if line.startswith("hpc-rl: "))
    assert message.startswith("hpc-rl: the temporary folder of node node") and "No space left on device" in message
    left = left_behind(cluster, workspace.folder / "runs" / f"tmp-{job}")
    assert list(disk.path.glob("0.*")) == []
    observed(Outcome("full temporary folder at the start", job, None, message, "exit code 2", None, left))
