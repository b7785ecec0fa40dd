"""Other people's programs on two nodes of a real Slurm, with CPUs: interrupted in every way, and without adapter."""

import dataclasses
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.programs import FILES as HOLDING_FILES
from tests.e2e.workspace import Workspace, make_workspace
from tests.programs.environments import PROGRAMS, REPOSITORY, python_of
from tests.programs.programs import BESIDE_VERL, FILES, KINDS, TRIED, Tried
from tests.programs.shown import Record
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S
from tests.sandbox.spec import Shape
from tests.sandbox.variants import PREEMPTING

pytestmark = [pytest.mark.programs, pytest.mark.sandbox]
CLUSTER = {**PREEMPTING, "shapes": (Shape(3, cpus=2, memory_mb=6000),)}
WALLTIME = ["--time", "3", "slurm.warning_s=60"]
"""Slurm's warning comes after one to two minutes."""


@dataclass(frozen=True)
class Run:
    """A run of a program."""

    workspace: Workspace
    cluster: Cluster
    tried: Tried
    name: str

    def command(self, *options: str, every: int | None = None) -> list[str]:
        tried = self.tried
        path = ":".join(map(str, [self.workspace.folder, BESIDE_VERL, REPOSITORY]))
        variables = {"PYTHONPATH": path, **tried.variables}
        settings = [f"slurm.python={python_of(tried.environment)}", "trainer.device=cpu"]
        settings += [f"slurm.env.{name}={value}" for name, value in variables.items()]
        typed = tried.command.format(run=self.name, steps=tried.steps, every=every or tried.every).split()
        return ["submit", "torchrun", "--job-name", self.name, *settings, *options, "--", *typed]

    def submit(self, *options: str, every: int | None = None) -> str:
        done = self.workspace.hpc_rl(*self.command("--nodes", "2", *options, every=every))
        assert done.returncode == 0, done.stdout + done.stderr + self.workspace.logs()
        return done.stderr

    @property
    def folder(self) -> Path:
        return self.workspace.folder / "runs" / self.name

    def begun(self, attempt: int) -> list[int]:
        """Return the steps that an attempt has noted as it made them."""
        steps = self.folder / f"attempt-{attempt}" / "steps"
        return [int(line) for line in steps.read_text().split()] if steps.exists() else []

    def wait_for(self, attempt: int, step: int) -> None:
        """Wait until an attempt is held at a step, and everything before it is written."""
        self.workspace.wait_until(
            lambda: bool(found := self.begun(attempt)) and found[-1] == step, f"attempt {attempt} at step {step}"
        )

    def preempt(self) -> None:
        """Queue a job of a higher priority that takes all nodes, and wait until it has ended."""
        words = ["--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--mem=1G", "--output=/dev/null"]
        queued = self.cluster.run(["sbatch", *words, "--wrap=true"], cwd=self.workspace.folder, check=True)
        self.cluster.wait_job(queued.stdout.strip())

    def lose_a_node(self) -> None:
        """Cut the power of the second node of the job."""
        lost = self.cluster.run(["scontrol", "show", "hostnames", str(self.workspace.status(self.name)["nodes"])])
        node = lost.stdout.split()[1]
        self.cluster.kill_node(node)
        self.workspace.wait_until(lambda: self.begun(2) != [] and self.attempt >= 3, "the attempt after the lost node")
        self.cluster.restore_node(node)

    @property
    def attempt(self) -> int:
        return int(str(self.workspace.status(self.name)["attempt"]))

    @property
    def repeated(self) -> int:
        """Number of steps that were noted by two attempts."""
        noted = [step for attempt in range(1, self.attempt + 1) for step in self.begun(attempt)]
        return len(noted) - len(set(noted))

    def follow(self) -> tuple[int, str]:
        """Wait for the end of the run, and return its exit code and its state."""
        ended = self.workspace.hpc_rl("logs", "-f", self.name)
        return ended.returncode, str(self.workspace.status(self.name)["state"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from sandbox_cluster("pytest-programs", **CLUSTER)


@pytest.fixture(scope="module")
def workspace(cluster: Cluster) -> Workspace:
    workspace = make_workspace(cluster.shared / f"programs-{uuid.uuid4().hex[:8]}", cluster.env)
    for name, text in {**HOLDING_FILES, **FILES}.items():
        (workspace.folder / name).write_text(text)
    tokenizer = workspace.folder / "model" / "tokenizer_config.json"  # transformers 4 does not have version 5's class
    tokenizer.write_text(tokenizer.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    if (PROGRAMS / "verl").exists():
        model = shutil.copytree(workspace.folder / "model", workspace.folder / "verl-model")
        data = [python_of("verl"), str(BESIDE_VERL / "data.py"), str(model), str(workspace.folder)]
        subprocess.run(data, check=True, timeout=600)
    return workspace


@pytest.mark.parametrize("program", TRIED)
def test_whatever_interrupts_it_it_ends_as_if_nothing_had(cluster: Cluster, workspace: Workspace, program: str) -> None:
    tried = TRIED[program]
    record = Record(program, tried)
    record.forgets()
    whole, run = (Run(workspace, cluster, tried, f"{program}-{name}") for name in ("whole", "held"))
    whole.submit("--partition", "urgent", "--wait")
    losses = workspace.losses(whole.name)
    assert sorted(losses) == list(range(1, tried.steps + 1))
    first, second, third = tried.holds
    held = f"slurm.env.HOLD_AT_STEP={first},{second},{third}"
    assert "saves" in run.submit(held)

    run.wait_for(1, first)
    run.preempt()
    run.wait_for(2, second)
    assert "stopped before the preemption" in workspace.ok("logs", run.name)
    assert not tried.is_exact or run.repeated == 0
    record.shows("preemption")

    run.lose_a_node()
    run.wait_for(3, second)
    lost = run.repeated
    assert run.begun(3)[0] >= tried.every and (not tried.is_exact or 0 < lost <= 2)
    record.shows("lost node")

    workspace.ok("stop", run.name)
    assert run.follow() == (75, "STOPPED")
    assert not tried.is_exact or "checkpoint saved" in workspace.ok("logs", run.name)

    if program == "verl-sft":
        refused = workspace.hpc_rl(*run.command("--nodes", "1"))
        assert refused.returncode == 2 and "was written by 2 GPUs, and FSDP of verl resumes it on" in refused.stderr
    run.submit(held, *WALLTIME)
    assert run.follow() == (0, "COMPLETED")
    assert run.begun(4)[0] > second
    record.shows("stop")
    assert "stopped before the walltime" in workspace.ok("logs", run.name) and run.attempt >= 5
    assert not tried.is_exact or run.repeated == lost
    record.shows("walltime")
    assert workspace.losses(run.name) == losses
    record.shows("equal losses")
    if program == "verl-sft":
        run.submit("--wait")
        assert (
            "step 10 of 10 is saved already" in workspace.ok("logs", run.name) and workspace.losses(run.name) == losses
        )


@pytest.mark.parametrize("program", KINDS)
def test_without_the_adapter_a_preemption_costs_everything(
    cluster: Cluster, workspace: Workspace, program: str
) -> None:
    tried = TRIED[program]
    run = Run(workspace, cluster, tried, f"{program}-none")
    hold = [f"slurm.env.HOLD_AT_STEP={tried.holds[1]}", "slurm.env.HOLD_UNTIL=attempt-2"]
    run.submit("slurm.adapter=none", "--partition", "abrupt", *hold, every=1000)
    run.wait_for(1, tried.holds[1])
    run.preempt()
    assert run.follow() == (0, "COMPLETED")
    assert run.begun(2)[: len(run.begun(1))] == run.begun(1) and run.begun(1)[0] <= 1
    assert not (run.folder / "metrics.jsonl").exists()
    Record(program, tried).shows("all lost without it")


def outside(run: Run, where: str, *options: str, minutes: int = 60, times: int = 1) -> subprocess.Popen[str]:
    """Start a run on this machine or in an allocation, so many times one after the other."""
    nodes, prefix = ["--nodes", "1", "--gpus-per-node", "2"], []
    if where == "--in-allocation":
        nodes, prefix = ["--nodes", "2"], ["salloc", "-p", "urgent", "-N", "2", "-n", "2", f"--time={minutes}"]
    submit = shlex.join([sys.executable, "-m", "hpc_rl.cli", *run.command(where, *nodes, *options)])
    return subprocess.Popen(
        [*prefix, "bash", "-c", f"{submit}; echo ended $?; " * times], cwd=run.workspace.folder,
        env=dict(run.workspace.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("where", ["--local", "--in-allocation"])
def test_outside_of_a_batch_job_the_same_command_resumes(cluster: Cluster, workspace: Workspace, where: str) -> None:
    run = Run(workspace, cluster, TRIED["trl-sft"], f"trl-sft{where}")
    with outside(run, where, "slurm.env.HOLD_AT_STEP=4", times=2) as shell:
        run.wait_for(1, 4)
        workspace.ok("stop", run.name)
        said, _ = shell.communicate(timeout=DEADLINE_S)
    assert [line for line in said.splitlines() if line.startswith("ended")] == ["ended 75", "ended 0"], said
    assert (run.begun(1)[-1], run.begun(2)[0], run.repeated) == (4, 5, 0)
    whole = dataclasses.replace(run, name=f"{run.name}-whole")
    whole.submit("--wait")
    assert workspace.losses(run.name) == workspace.losses(whole.name)
    Record("trl-sft", run.tried).shows(where)


def test_a_program_saves_before_an_allocation_ends(cluster: Cluster, workspace: Workspace) -> None:
    run = Run(workspace, cluster, dataclasses.replace(TRIED["trl-sft"], steps=10**6, every=10**6), "allocated")
    with outside(run, "--in-allocation", minutes=2) as shell:
        said, _ = shell.communicate(timeout=DEADLINE_S)
    assert "stopping: the walltime ends in" in said and "checkpoint saved" in said and "ended 75" in said, said
