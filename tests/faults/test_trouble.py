"""Trouble of jobs on real nodes: storage that stalls, wrong clocks, useless rewards, and stops at bad times."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import saved_by
from tests.conftest import sandbox_cluster
from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import SMALL_PPO, left_behind, measured, steps_lost, workspace_on
from tests.faults.outcomes import Outcome
from tests.faults.pauses import pause_in
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.faults]
Job = Literal["sft", "ppo"]
STALL_S = 60
STEPS = {"sft": "trainer.total_training_steps=12", "ppo": "trainer.total_training_steps=6"}
OPTIONS = {
    "sft": [*QUICK, STEPS["sft"]],
    "ppo": [*SMALL_PPO, "slurm.mem=4G", STEPS["ppo"]],
}
EVERY = ["--nodes", "2", "trainer.test_freq=0", "trainer.export=false"]
SKEW = """
import os, time

if os.uname().nodename == os.environ.get("SKEWED_NODE"):
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + 3600
    time.time_ns = lambda: now_ns() + 3600 * 10**9
"""
"""A sitecustomize.py: on one node, the clock is an hour ahead of the others'."""
REWARD = """
import os, pathlib, time

def score(response, answer):
    if "HPC_RL_RUN_DIR" in os.environ:  # also called before the job is submitted
        pathlib.Path(os.environ["HPC_RL_RUN_DIR"], "called").open("a").close()
    {statement}
"""
"""A reward function that leaves a mark of its first call."""


@dataclass(frozen=True)
class Place:
    """A cluster with a file system for run directories that can be stopped."""

    cluster: Cluster
    workspace: Workspace
    disk: Path
    expected: dict[Job, dict[int, float]]

    def whole(self, job: Job) -> dict[int, float]:
        """Return what each step of a run measures that nothing disturbs."""
        if job not in self.expected:
            self.workspace.ok("submit", job, "--wait", "--job-name", f"whole-{job}", *OPTIONS[job], *EVERY)
            self.expected[job] = dict(measured(self.workspace.folder / "runs" / f"whole-{job}"))
        return self.expected[job]


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Mount an ext4 file system, which can be frozen, on a new folder."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=300)
    done = subprocess.run(
        ["mount", "-o", "loop", image, disk], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip(f"no loop devices here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True, timeout=300)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def place(slurm_tree: str) -> Iterator[Place]:
    # The file system is mounted before the nodes start, so that they see it too.
    with mounted(Path(tempfile.mkdtemp(dir="/var/tmp", prefix="hpc-rl-"))) as disk:
        for cluster in sandbox_cluster("pytest-trouble", nodes=2, cpus=2, memory_mb=6000, tree=slurm_tree):
            workspace = workspace_on(cluster, "trouble")
            yield Place(cluster, workspace, disk, {})


@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_the_shared_file_system_stalls(place: Place, job: Job, observed: Callable[[Outcome], None]) -> None:
    workspace, run = place.workspace, place.disk / job
    whole = place.whole(job)
    saves = ["trainer.save_freq=1", "trainer.hang_timeout_s=30", "--run-dir", str(run)]
    workspace.ok("submit", job, *OPTIONS[job], *EVERY, *saves)
    workspace.wait_until(lambda: len(measured(run)) >= 2, "2 steps")
    # Nothing here may write to it meanwhile, and another process thaws it, whatever happens to this one.
    freeze = f"fsfreeze --freeze {place.disk}; sleep {STALL_S}; fsfreeze --unfreeze {place.disk}"
    with subprocess.Popen(["setsid", "sh", "-c", freeze]) as stall:
        stall.wait(timeout=STALL_S + 600)
    workspace.wait_until(lambda: workspace.status(str(run))["state"] not in ("PENDING", "RUNNING"), "the end")
    assert workspace.status(str(run))["state"] == "COMPLETED", workspace.ok("logs", str(run))
    assert dict(measured(run)) == pytest.approx(whole, abs=1e-4)
    lost, left = steps_lost(measured(run)), left_behind(place.cluster, run)
    observed(Outcome(f"file system stalls for {STALL_S} s", job, None, "", "went on", lost, left, losses_equal=True))


@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_a_node_whose_clock_is_wrong(place: Place, job: Job, observed: Callable[[Outcome], None]) -> None:
    workspace, whole = place.workspace, place.whole(job)
    folder = workspace.folder / "skew"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SKEW)
    skewed = [f"slurm.env.PYTHONPATH={folder}", "slurm.env.SKEWED_NODE=node2", "trainer.save_freq=2"]
    limits = ["--time", "30", "trainer.hang_timeout_s=60"]
    workspace.ok("submit", job, "--wait", "--job-name", f"skewed-{job}", *OPTIONS[job], *EVERY, *skewed, *limits)
    run = workspace.folder / "runs" / f"skewed-{job}"
    assert dict(measured(run)) == pytest.approx(whole, abs=1e-4)
    lost, left = steps_lost(measured(run)), left_behind(place.cluster, run)
    observed(Outcome("a clock that is an hour ahead", job, None, "", "unaffected", lost, left, losses_equal=True))


@pytest.mark.parametrize(
    ("name", "statement", "message"),
    [
        ("raises", "raise KeyError('no such field')", "no such field"),
        ("never returns", "time.sleep(10000)", "over 3 s"),
    ],
)
def test_a_reward_that_never_works(
    place: Place, name: str, statement: str, message: str, observed: Callable[[Outcome], None]
) -> None:
    workspace, run = place.workspace, name.replace(" ", "-")
    (workspace.folder / f"{run}.py").write_text(REWARD.format(statement=statement))
    reward = [f"reward.function={run}.py:score", "reward.timeout_s=3", "reward.workers=8"]
    workspace.ok("submit", "ppo", "--job-name", run, *OPTIONS["ppo"], *EVERY, *reward)
    folder = workspace.folder / "runs" / run
    workspace.wait_until(lambda: message in "".join(log.read_text() for log in folder.glob("job-*.log")), "the message")
    seconds = time.time() - (folder / "called").stat().st_mtime
    ended = workspace.hpc_rl("logs", "-f", run)
    log = workspace.ok("logs", run)
    assert ended.returncode == 1 and workspace.status(run)["exit_code"] == 1, log
    line = next(line for line in log.splitlines() if line.startswith("hpc-rl: ") and "Ray is up" not in line)
    assert message in line and "Traceback" not in log[: log.index(line)], log
    left = left_behind(place.cluster, folder)
    observed(Outcome(f"a reward that {name}", "ppo", seconds, line[8:], "exit code 1", None, left))


@pytest.mark.parametrize(
    ("job", "what", "function", "state"),
    [
        ("sft", "a save", "hpc_rl.training.checkpoints.checkpoint:Saver.save", "STOPPED"),
        ("ppo", "a save", "hpc_rl.rl.loop.trainer:save", "STOPPED"),
        ("sft", "the export", "hpc_rl.finetune.trainer:export", "COMPLETED"),
    ],
)
def test_a_stop_at_a_bad_time(
    place: Place, job: Job, what: str, function: str, state: str, observed: Callable[[Outcome], None]
) -> None:
    workspace, whole = place.workspace, place.whole(job)
    name = f"{job}-{what}".replace(" ", "-")
    command = ["submit", job, "--nodes", "2", "--job-name", name, *OPTIONS[job], "trainer.test_freq=0"]
    workspace.ok(*command, *pause_in(workspace, function), "trainer.save_freq=4")
    run = workspace.folder / "runs" / name
    workspace.wait_until(lambda: (run / "paused").exists(), f"{name} in {what}")
    workspace.ok("stop", name)
    workspace.wait_until(lambda: workspace.status(name)["state"] not in ("PENDING", "RUNNING"), "the end")
    assert workspace.status(name)["state"] == state, workspace.ok("logs", name)
    workspace.ok("runs", "--verify", name)
    if state == "STOPPED":
        (run / "paused").unlink()
        workspace.ok(*command, "--wait")
    assert (run / "model" / "model.safetensors").exists()
    assert dict(measured(run)) == pytest.approx(whole, abs=1e-4)
    lost, left = steps_lost(measured(run)), left_behind(place.cluster, run)
    observed(Outcome(f"`hpc-rl stop` during {what}", job, None, "", state.lower(), lost, left, losses_equal=True))


def test_a_second_signal_during_a_save(place: Place, observed: Callable[[Outcome], None]) -> None:
    """It ends the processes at once. The last complete checkpoint stays, and the run resumes from it."""
    workspace, whole, cluster = place.workspace, place.whole("sft"), place.cluster
    command = ["submit", "sft", "--job-name", "impatient", *OPTIONS["sft"], *EVERY, "slurm.requeue=false"]
    function = "hpc_rl.training.checkpoints.checkpoint:Saver.save"
    mark = "checkpoints/step-00000001"
    workspace.ok(*command, "trainer.save_freq=1", *pause_in(workspace, function, mark=mark, until="go"))
    run = workspace.folder / "runs" / "impatient"
    workspace.wait_until(lambda: (run / "paused").exists(), "a save after the first one")
    saved = saved_by(RunDir(run))
    job, signals = str(workspace.status("impatient")["job_id"]), 0

    def has_ended() -> bool:  # signals that come close together are one
        nonlocal signals
        cluster.run(["scancel", "--signal=USR2", job])
        signals += 1
        return workspace.status("impatient")["state"] not in ("RUNNING", "COMPLETING")

    workspace.wait_until(has_ended, "the end")
    assert workspace.status("impatient")["state"] == "FAILED" and signals > 1, workspace.ok("logs", "impatient")
    left = left_behind(cluster, run)
    kept = saved_by(RunDir(run))
    assert saved is not None and kept is not None and kept >= saved
    workspace.ok("runs", "--verify", "impatient")
    workspace.ok(*command, "--wait")
    assert f"resuming after step {int(kept.removeprefix('step-'))}," in workspace.ok("logs", "impatient")
    assert dict(measured(run)) == pytest.approx(whole, abs=1e-4)
    lost = steps_lost(measured(run))
    fault, ended = "a second signal during a save", "ended at once; resumed when it was submitted again"
    observed(Outcome(fault, "sft", None, "", ended, lost, left, losses_equal=True))
