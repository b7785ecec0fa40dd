"""Preemption on real nodes: a job of a higher priority takes the nodes, the run saves, and resumes afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import SMALL_PPO, measured, workspace_on
from tests.faults.outcomes import Outcome
from tests.sandbox.cluster import Cluster
from tests.sandbox.variants import PREEMPTING, SIGNALLING, SUSPENDING

pytestmark = pytest.mark.sandbox
Job = Literal["sft", "ppo"]
SIZES: dict[Job, list[str]] = {
    "sft": ["sft", *QUICK, "trainer.total_training_steps=8"],
    "ppo": ["ppo", *SMALL_PPO, "trainer.total_training_steps=6"],
}
EVERY = ["--nodes", "2", "--mem", "4G", "--time", "60", "trainer.test_freq=0", "trainer.export=false"]


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

    def preempt(self) -> None:
        """Queue a job that takes all nodes, and wait until it has ended."""
        options = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--mem=1G", "--output=/dev/null"]
        queued = self.cluster.run(["sbatch", *options, "--wrap=true"], cwd=self.workspace.folder, check=True)
        self.cluster.wait_job(queued.stdout.strip())


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
    """Start a run, and wait until it is in its third step or later. An SFT run is held there."""
    held = found.workspace.hold_at(3) if job == "sft" else []
    found.workspace.ok("submit", *SIZES[job], *EVERY, "--partition", partition, "--job-name", run, *held)
    wanted = 3 if job == "sft" else 2
    found.workspace.wait_until(lambda: len(found.measured(run)) >= wanted, f"{run} at step {wanted}")


def is_preempted(found: Site, job: Job, partition: str, fault: str, message: str) -> Outcome:
    """Preempt a run, check that it resumes without a lost step, and return what was observed."""
    run = f"{partition}-{job}"
    begin(found, job, partition, run)
    found.preempt()
    found.workspace.ok("logs", "-f", run)
    log = found.workspace.ok("logs", run)
    line = next((line for line in log.splitlines() if message in line), "")
    assert line, log
    status = found.workspace.status(run)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 2), log
    measured = found.measured(run)
    assert dict(measured) == pytest.approx(found.whole(job), abs=1e-4)
    lost = len(measured) - len(dict(measured))
    assert lost <= 1
    return Outcome(fault, job, None, line, "resumed", lost, losses_equal=True)


def test_a_preempted_run_saves_and_resumes(preempting: Site) -> None:
    message = "saved before the preemption; job"
    assert is_preempted(preempting, "sft", "graceful", "preemption", message).steps_lost == 0


@pytest.mark.faults
@pytest.mark.parametrize(
    ("job", "partition", "fault", "message"),
    [
        ("ppo", "graceful", "preemption, REQUEUE with GraceTime", "saved before the preemption; job"),
        ("sft", "cancelling", "preemption, CANCEL with GraceTime", "saved before the preemption; job"),
        ("ppo", "cancelling", "preemption, CANCEL with GraceTime", "saved before the preemption; job"),
        ("sft", "abrupt", "preemption, REQUEUE without GraceTime", "saved before the preemption; Slurm has queued"),
        ("ppo", "abrupt", "preemption, REQUEUE without GraceTime", "saved before the preemption; Slurm has queued"),
    ],
)
def test_modes(
    preempting: Site, job: Job, partition: str, fault: str, message: str, observed: Callable[[Outcome], None]
) -> None:
    observed(is_preempted(preempting, job, partition, fault, message))


@pytest.mark.faults
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_the_jobs_own_signal(signalling: Site, job: Job, observed: Callable[[Outcome], None]) -> None:
    message = "saved before the preemption; job"
    observed(is_preempted(signalling, job, "graceful", "preemption, preempt_send_user_signal", message))


@pytest.mark.faults
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_a_suspended_job_goes_on(suspending: Site, job: Job, observed: Callable[[Outcome], None]) -> None:
    run = f"suspended-{job}"
    begin(suspending, job, "suspended", run)
    suspending.preempt()
    suspending.workspace.release(run)
    suspending.workspace.ok("logs", "-f", run)
    status = suspending.workspace.status(run)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 1)
    assert dict(suspending.measured(run)) == pytest.approx(suspending.whole(job), abs=1e-4)
    observed(Outcome("preemption, SUSPEND", job, None, "", "continued", 0, losses_equal=True))


@pytest.mark.faults
def test_signals_by_hand(preempting: Site, observed: Callable[[Outcome], None]) -> None:
    """`scancel --signal=USR2` and `scontrol requeue` save first. A cancelled run is not queued again."""
    workspace, cluster = preempting.workspace, preempting.cluster
    for fault, command, message in (
        ("scancel --signal=USR2", ["scancel", "--signal=USR2"], "saved before the requeue; job"),
        ("scontrol requeue", ["scontrol", "requeue"], "saved before the preemption; Slurm has queued"),
    ):
        run = command[0]
        begin(preempting, "sft", "urgent", run)
        cluster.run([*command, str(workspace.status(run)["job_id"])], check=True)
        workspace.ok("logs", "-f", run)
        assert message in workspace.ok("logs", run)
        assert workspace.status(run)["attempt"] == 2
        measured = preempting.measured(run)
        assert dict(measured) == pytest.approx(preempting.whole("sft"), abs=1e-4)
        lost = len(measured) - len(dict(measured))
        observed(Outcome(fault, "sft", None, message, "resumed", lost, losses_equal=True))
    begin(preempting, "sft", "urgent", "cancelled")
    workspace.ok("cancel", "cancelled")
    followed = workspace.hpc_rl("logs", "-f", "cancelled")
    assert followed.returncode not in (0, 75)
    cluster.wait_idle()
    own = json.loads((workspace.folder / "runs/cancelled/status.json").read_text())
    assert own["state"] == workspace.status("cancelled")["state"] == "CANCELLED"
