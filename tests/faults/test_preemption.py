"""Preemption on real nodes: a job of a higher priority takes the nodes, the run saves, and resumes afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from hpc_rl.run_dir import moved_end_file
from tests.conftest import sandbox_cluster
from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import SMALL_PPO, left_behind, measured, steps_lost, workspace_on
from tests.faults.outcomes import Outcome
from tests.faults.pauses import pause_in
from tests.sandbox.cluster import Cluster
from tests.sandbox.variants import PREEMPTING, SIGNALLING, SUSPENDING

pytestmark = pytest.mark.sandbox
Job = Literal["sft", "ppo"]
SIZES: dict[Job, list[str]] = {
    "sft": ["sft", *QUICK, "trainer.total_training_steps=8"],
    "ppo": ["ppo", *SMALL_PPO, "trainer.total_training_steps=6"],
}
EVERY = ["--nodes", "2", "--mem", "4G", "--time", "60", "trainer.test_freq=0", "trainer.export=false"]
ENDLESS = "trainer.total_training_steps=100000"
HANG_S, SUSPENDED_S = 30, 50
"""trainer.hang_timeout_s of the suspended jobs, and for how long they are suspended: longer than that, and longer than
the 25 s after which a node counts as lost."""


@dataclass(frozen=True)
class Site:
    """A cluster with preemption, and runs that nothing interrupted."""

    cluster: Cluster
    workspace: Workspace
    expected: dict[Job, dict[int, float]]

    def measured(self, run: str) -> list[tuple[int, float]]:
        """Return what each step measured: the loss, or the mean reward. A repeated step is there twice."""
        return measured(self.workspace.folder / "runs" / run)

    def whole(self, job: Job) -> dict[int, float]:
        if job not in self.expected:
            where = ["--partition", "urgent", "--job-name", f"whole-{job}"]
            self.workspace.ok("submit", *SIZES[job], *EVERY, *where, "--wait")
            self.expected[job] = dict(self.measured(f"whole-{job}"))
        return self.expected[job]

    def preempt(self, program: str = "true") -> None:
        """Queue a job that takes all nodes, and wait until it has ended."""
        options = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--mem=1G", "--output=/dev/null"]
        queued = self.cluster.run(["sbatch", *options, f"--wrap={program}"], cwd=self.workspace.folder, check=True)
        self.cluster.wait_job(queued.stdout.strip())

    def left_behind(self, run: str) -> str:
        return left_behind(self.cluster, self.workspace.folder / "runs" / run)


def site(name: str, spec: dict[str, object]) -> Iterator[Site]:
    for cluster in sandbox_cluster(f"pytest-{name}", **spec):
        workspace = workspace_on(cluster, name)
        yield Site(cluster, workspace, {})


@pytest.fixture(scope="module")
def preempting() -> Iterator[Site]:
    yield from site("preempting", PREEMPTING)


@pytest.fixture(scope="module")
def signalling() -> Iterator[Site]:
    yield from site("signalling", SIGNALLING)


@pytest.fixture(scope="module")
def suspending() -> Iterator[Site]:
    yield from site("suspending", SUSPENDING)


def begin(found: Site, job: Job, partition: str, run: str) -> None:
    """Start a run, and wait until it is held: after its third step for SFT, after its first for PPO."""
    workspace = found.workspace
    if job == "sft":
        step, held = 3, workspace.hold_at(3)
    else:
        step, held = 1, pause_in(workspace, "hpc_rl.rl.loop.trainer:timeline", until="stop attempt-2")
    workspace.ok("submit", *SIZES[job], *EVERY, "--partition", partition, "--job-name", run, *held)
    workspace.wait_until(lambda: len(found.measured(run)) >= step, f"{run} at step {step}")


def is_preempted(found: Site, run: str, job: Job, partition: str, fault: str, message: str) -> Outcome:
    """Preempt a run, check that it resumes without a lost step, and return what was observed."""
    begin(found, job, partition, run)
    found.preempt()
    found.workspace.ok("logs", "-f", run)
    log = found.workspace.ok("logs", run)
    line = next((line for line in log.splitlines() if message in line), "")
    assert line, log
    status = found.workspace.status(run)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 2), log
    return resumed(found, job, run, fault, line)


def resumed(found: Site, job: Job, run: str, fault: str, message: str) -> Outcome:
    """Check that a run lost at most one step and ended as if nothing had happened, and return what was observed."""
    measured = found.measured(run)
    assert dict(measured) == pytest.approx(found.whole(job), abs=1e-4)
    lost = steps_lost(measured)
    assert lost <= 1
    return Outcome(fault, job, None, message, "resumed", lost, found.left_behind(run), losses_equal=True)


def test_a_preempted_run_saves_and_resumes(preempting: Site) -> None:
    message = "stopped before the preemption; job"
    assert is_preempted(preempting, "selected", "sft", "graceful", "preemption", message).steps_lost == 0


@pytest.mark.faults
@pytest.mark.parametrize(
    ("job", "partition", "fault", "message"),
    [
        ("sft", "graceful", "preemption, REQUEUE with GraceTime", "stopped before the preemption; job"),
        ("ppo", "graceful", "preemption, REQUEUE with GraceTime", "stopped before the preemption; job"),
        ("sft", "cancelling", "preemption, CANCEL with GraceTime", "stopped before the preemption; job"),
        ("ppo", "cancelling", "preemption, CANCEL with GraceTime", "stopped before the preemption; job"),
        ("sft", "abrupt", "preemption, REQUEUE without GraceTime", "stopped before the preemption; Slurm has queued"),
        ("ppo", "abrupt", "preemption, REQUEUE without GraceTime", "stopped before the preemption; Slurm has queued"),
    ],
)
def test_modes(
    preempting: Site, job: Job, partition: str, fault: str, message: str, observed: Callable[[Outcome], None]
) -> None:
    observed(is_preempted(preempting, f"{partition}-{job}", job, partition, fault, message))


@pytest.mark.faults
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_the_jobs_own_signal(signalling: Site, job: Job, observed: Callable[[Outcome], None]) -> None:
    message = "stopped before the preemption; job"
    fault = "preemption, preempt_send_user_signal"
    observed(is_preempted(signalling, f"signalled-{job}", job, "graceful", fault, message))


@pytest.mark.faults
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_a_cancelled_job_is_submitted_again(preempting: Site, job: Job, observed: Callable[[Outcome], None]) -> None:
    """Without GraceTime, it has the time between SIGTERM and SIGKILL, and Slurm does not queue it again."""
    run, workspace = f"dropping-{job}", preempting.workspace
    begin(preempting, job, "dropping", run)
    preempting.preempt()
    ended = workspace.hpc_rl("logs", "-f", run)
    assert ended.returncode not in (0, 75)
    log = workspace.ok("logs", run)
    message = next((line for line in log.splitlines() if "checkpoint saved" in line), "")
    assert message and workspace.status(run)["state"] == "PREEMPTED", log
    workspace.ok("submit", *SIZES[job], *EVERY, "--partition", "dropping", "--job-name", run, "--wait")
    assert workspace.status(run)["attempt"] == 2
    outcome = resumed(preempting, job, run, "preemption, CANCEL without GraceTime", message)
    observed(replace(outcome, ended="PREEMPTED; resumed when it was submitted again"))


@pytest.mark.faults
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_a_suspended_job_goes_on(suspending: Site, job: Job, observed: Callable[[Outcome], None]) -> None:
    """Neither the watch for hangs nor the roll call counts the time in which the job does not run."""
    workspace, run, whole = suspending.workspace, f"suspended-{job}", f"undisturbed-{job}"

    def start(name: str, partition: str) -> None:
        where = ["--partition", partition, "--job-name", name, f"trainer.hang_timeout_s={HANG_S}"]
        workspace.ok("submit", *SIZES[job], *EVERY, *where, ENDLESS)

    def stopped_after(name: str, steps: int) -> dict[int, float]:
        workspace.wait_until(lambda: len(suspending.measured(name)) >= steps, f"{name} at step {steps}")
        workspace.ok("stop", name)
        workspace.wait_until(lambda: workspace.status(name)["state"] == "STOPPED", f"the end of {name}")
        return dict(suspending.measured(name))

    start(run, "suspended")
    workspace.wait_until(lambda: len(suspending.measured(run)) >= 3, f"{run} at step 3")
    suspending.preempt(f"sleep {SUSPENDED_S}")
    attempt = workspace.folder / "runs" / run / "attempt-1"
    workspace.wait_until(lambda: moved_end_file(attempt).exists(), "the later end of the walltime")
    walltime_s = float(moved_end_file(attempt).read_text()) - (attempt / "config.yaml").stat().st_mtime
    assert walltime_s > 3600 + HANG_S
    losses = stopped_after(run, len(suspending.measured(run)) + 3)
    assert workspace.status(run)["attempt"] == 1, workspace.ok("logs", run)
    assert longest_pause_s(workspace.folder / "runs" / run) > HANG_S  # Slurm takes some seconds to stop it
    left = suspending.left_behind(run)
    start(whole, "urgent")
    expected = stopped_after(whole, len(losses))
    assert losses == pytest.approx({step: expected[step] for step in losses}, abs=1e-4)
    lost = steps_lost(suspending.measured(run))
    fault = f"preemption, SUSPEND for {SUSPENDED_S} s"
    observed(Outcome(fault, job, None, "", "continued", lost, left, losses_equal=True))


def longest_pause_s(run: Path) -> float:
    """Return the longest time between two steps."""
    times = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.faults
@pytest.mark.parametrize("job", ["sft", "ppo"])
@pytest.mark.parametrize(
    ("fault", "command", "words"),
    [
        ("scancel --signal=USR2", ["scancel", "--signal=USR2"], "stopped before the requeue; job"),
        ("scontrol requeue", ["scontrol", "requeue"], "stopped before the preemption; Slurm has queued"),
    ],
)
def test_signals_by_hand(
    preempting: Site, job: Job, fault: str, command: list[str], words: str, observed: Callable[[Outcome], None]
) -> None:
    """The run saves first."""
    workspace, cluster = preempting.workspace, preempting.cluster
    run = f"{command[0]}-{job}"
    begin(preempting, job, "urgent", run)
    cluster.run([*command, str(workspace.status(run)["job_id"])], check=True)
    workspace.ok("logs", "-f", run)
    message = next((line for line in workspace.ok("logs", run).splitlines() if words in line), "")
    assert message and workspace.status(run)["attempt"] == 2, workspace.ok("logs", run)
    observed(resumed(preempting, job, run, fault, message))


@pytest.mark.faults
def test_a_cancelled_run_saves_and_is_not_queued_again(preempting: Site, observed: Callable[[Outcome], None]) -> None:
    workspace, run = preempting.workspace, "cancelled"
    begin(preempting, "sft", "urgent", run)
    done = len(preempting.measured(run))
    workspace.ok("cancel", run)
    followed = workspace.hpc_rl("logs", "-f", run)
    assert followed.returncode not in (0, 75)
    left = preempting.left_behind(run)
    folder = workspace.folder / "runs" / run
    own = json.loads((folder / "status.json").read_text())
    assert own["state"] == workspace.status(run)["state"] == "CANCELLED"
    saved = [int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir()]
    assert saved and max(saved) >= done, workspace.ok("logs", run)
    workspace.ok("runs", "--verify", run)
    observed(Outcome("`hpc-rl cancel`", "sft", None, "", "saved; CANCELLED", None, left))
