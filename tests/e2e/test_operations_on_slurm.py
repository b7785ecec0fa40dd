"""Day-to-day operations on a real Slurm: sweeps, chains, requeue, attach, jobs in an allocation, the table of runs."""

import json
import os
import shlex
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S

pytestmark = pytest.mark.sandbox
SFT = ["sft", *QUICK, "trainer.total_training_steps=4"]
FAILS = "slurm.setup=[exit 3]"
SETUPS = ['slurm.setup=["true"],["exit 3"]']
WAITS = """\
import os, pathlib, sys, time
run = pathlib.Path(os.environ["HPC_RL_RUN_DIR"])
print("attempt", os.environ["HPC_RL_ATTEMPT_DIR"][-1], "with", os.environ.get("N"), flush=True)
while not (run / "go").exists():
    if (run / "stop").exists():
        sys.exit(75)
    time.sleep(0.1)
"""
"""A program that ends when `go` or `stop` appears in its run directory."""
WAITING = ["trainer.device=cpu", "--", "waits.py"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    workspace = make_workspace(slurm_cluster.shared / f"ops-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    (workspace.folder / "waits.py").write_text(WAITS)
    (workspace.folder / "nothing.py").touch()
    return workspace


def rows(workspace: Workspace, *sweep: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(workspace.ok("runs", *sweep, "--json"))
    return found


def states(workspace: Workspace, sweep: str) -> list[str]:
    return [row["state"] for row in rows(workspace, sweep)]


def wait_for_states(workspace: Workspace, sweep: str, *wanted: str) -> None:
    workspace.wait_until(lambda: states(workspace, sweep) == list(wanted), f"{sweep}: {wanted}")


def wait_for_line(workspace: Workspace, run: Path, text: str) -> None:
    def seen() -> bool:
        return any(text in log.read_text() for log in run.glob("job-*.log"))

    workspace.wait_until(seen, f"{text!r} in the log of {run.name}")


@pytest.mark.long
def test_a_sweep_trains_and_its_table_shows_what_failed(workspace: Workspace, slurm_cluster: Cluster) -> None:
    swept = [*SETUPS, "optim.lr=1e-3,3e-3", "--max-parallel", "2", *workspace.hold_at(1)]
    arguments = ["sweep", *(word for word in SFT if not word.startswith("optim.lr=")), *swept]
    scripts = workspace.ok(*arguments, "--dry-run")
    assert not (workspace.folder / "runs").exists()
    workspace.ok(*arguments)
    sweep = workspace.folder / "runs" / "sft-sweep-1"
    files = [sweep / "sweep.sbatch", *(sweep / f"sft-sweep-1_{number}" / "job.sbatch" for number in (1, 2, 3, 4))]
    assert scripts == "".join(f"==> {path.relative_to(sweep)} <==\n{path.read_text()}\n" for path in files)
    workspace.wait_until(
        lambda: [row["reason"] for row in rows(workspace, "sft-sweep-1")][2:] == ["JobArrayTaskLimit"] * 2,
        "two at a time",
    )
    for number in (1, 2):
        workspace.release(f"sft-sweep-1/sft-sweep-1_{number}")
    wait_for_states(workspace, "sft-sweep-1", "COMPLETED", "COMPLETED", "FAILED", "FAILED")
    found = rows(workspace, "sft-sweep-1")
    assert [row["values"]["optim.lr"] for row in found] == ["1e-3", "3e-3"] * 2
    assert [row["step"] for row in found] == [4, 4, None, None]
    assert found[0]["metrics"]["train/loss"] != found[1]["metrics"]["train/loss"]
    assert found[0]["node_hours"] > 0 and found[0]["log"].endswith(f"job-{found[0]['job_id']}.log")
    assert (sweep / "sft-sweep-1_2" / "model" / "config.json").exists()
    table = workspace.ok("runs", "sft-sweep-1").splitlines()
    assert "FAILED" in table[3] and "1e-3" in table[3] and "train/loss" in table[2]
    status = workspace.status("sft-sweep-1_2")
    assert (status["state"], status["run"]) == ("COMPLETED", "sft-sweep-1_2")
    array = str(status["job_id"]).partition("_")[0]
    assert workspace.status(f"{array}_2")["run"] == "sft-sweep-1_2"
    assert "is a sweep" in workspace.hpc_rl("status", array).stderr
    refused = workspace.hpc_rl("submit", *SFT, "--after", "sft-sweep-1")
    assert refused.returncode == 2 and "run sft-sweep-1_3 is FAILED" in refused.stderr


def test_a_sweep_is_stopped_attached_to_queued_again_and_cancelled(workspace: Workspace) -> None:
    words = ["sweep", "torchrun", "--job-name", "wait", "--max-parallel", "1", "slurm.env.N=7,8,9"]
    workspace.ok(*words, "--sbatch", "gpus-per-node=1", *WAITING)
    sweep = workspace.folder / "runs" / "wait"
    wait_for_line(workspace, sweep / "wait_1", "attempt 1 with 7")
    assert states(workspace, "wait") == ["RUNNING", "PENDING", "PENDING"]
    seen = workspace.ok("attach", "wait_1", "sh", "-c", 'hostname; echo "$HPC_RL_RUN_DIR" "$CUDA_VISIBLE_DEVICES"')
    assert seen.split()[1:] == [str(sweep / "wait_1"), "0"]
    refused = workspace.hpc_rl("attach", "--node", "1", "wait_1")
    assert refused.returncode == 2 and "has no node 1: its nodes are 0 to 0" in refused.stderr
    assert "1 running job of sweep wait" in workspace.ok("stop", "wait")
    wait_for_states(workspace, "wait", "STOPPED", "CANCELLED", "CANCELLED")
    array = str(workspace.status("wait_3")["job_id"]).partition("_")[0]

    said = workspace.ok("requeue", "wait")
    assert "3 of 3 runs of sweep wait are queued again (previous states: 2 CANCELLED, 1 STOPPED)" in said
    wait_for_line(workspace, sweep / "wait_1", "attempt 2 with 7")
    again = str(workspace.status("wait_3")["job_id"])
    assert again.endswith("_3") and not again.startswith(f"{array}_")
    assert "cancelled 3 jobs of sweep wait (previous states: 2 PENDING, 1 RUNNING)" in workspace.ok("cancel", "wait")
    wait_for_states(workspace, "wait", "CANCELLED", "CANCELLED", "CANCELLED")
    assert "has no job to cancel: 3 CANCELLED" in workspace.ok("cancel", "wait")

    (sweep / "wait_2" / "go").touch()
    assert "run wait_2 starts again, and resumes if your program can (previous state: CANCELLED)" in workspace.ok(
        "requeue", "wait_2"
    )
    wait_for_states(workspace, "wait", "CANCELLED", "COMPLETED", "CANCELLED")
    assert "has nothing to resume: its state is COMPLETED" in workspace.ok("requeue", "wait_2")


@pytest.mark.long
def test_a_chain_trains_on_what_the_stage_before_exported(workspace: Workspace, slurm_cluster: Cluster) -> None:
    first, second = ["sft", "--job-name", "one", *QUICK], ["sft", "--job-name", "two", "--nodes", "2", *QUICK[1:]]
    steps = "trainer.total_training_steps=2"
    dry = workspace.ok("chain", "--dry-run", *first, steps, "--", *second, steps)
    said = workspace.ok("chain", *first, steps, "--", *second, steps)
    assert "after job" in said.splitlines()[2]
    for name in ("one", "two"):
        assert f"==> {name}/job.sbatch <==\n{(workspace.folder / 'runs' / name / 'job.sbatch').read_text()}" in dry
    slurm_cluster.wait_job(str(workspace.status("two")["job_id"]))
    assert [workspace.status(name)["state"] for name in ("one", "two")] == ["COMPLETED"] * 2, workspace.logs()
    folder = workspace.folder / "runs"
    assert f"path: {folder / 'one' / 'model'}\n" in (folder / "two" / "config.yaml").read_text()
    assert workspace.losses("two")[2] < workspace.losses("one")[1]


def test_a_chain_that_breaks_leaves_nothing_waiting(workspace: Workspace) -> None:
    second = ["sft", *QUICK[1:]]
    before = sorted((workspace.folder / "runs").iterdir())
    refused = workspace.hpc_rl("chain", "sft", *QUICK, "--", *second, "--sbatch", "nodelist=nope")
    assert refused.returncode == 2 and "Invalid node name specified" in refused.stderr
    assert sorted((workspace.folder / "runs").iterdir()) == before

    workspace.ok("chain", "sft", "--job-name", "broken", *QUICK, FAILS, "--", *second, "--job-name", "never")
    workspace.wait_until(lambda: workspace.status("never")["state"] == "CANCELLED", "cancelled by Slurm")
    assert workspace.status("broken")["state"] == "FAILED"
    refused = workspace.hpc_rl("requeue", "never")
    assert refused.returncode == 2 and "run broken is FAILED" in refused.stderr
    assert "start it again with hpc-rl requeue broken" in refused.stderr


@pytest.mark.long
def test_a_running_job_saves_and_is_queued_again(workspace: Workspace, slurm_cluster: Cluster) -> None:
    workspace.ok("submit", "torchrun", "--job-name", "again", "slurm.env.N=1", *WAITING)
    run = workspace.folder / "runs" / "again"
    wait_for_line(workspace, run, "attempt 1")
    job_id = workspace.status("again")["job_id"]
    slurm_cluster.drain(True)  # the job stays in the queue until the test has looked at it there
    assert "will save as soon as it can and then be requeued" in workspace.ok("requeue", "again")
    workspace.wait_until(lambda: workspace.status("again")["state"] == "PENDING", "queued again")
    assert "is already waiting in the queue" in workspace.ok("requeue", "again")
    slurm_cluster.drain(False)
    workspace.release("again")
    workspace.ok("submit", "torchrun", "--after", "again", "--wait", "trainer.device=cpu", "--", "nothing.py")
    status = workspace.status("again")
    assert (status["job_id"], status["state"], status["attempt"]) == (job_id, "COMPLETED", 2)
    done = workspace.ok("submit", "torchrun", "--after", "again", "--dry-run", "trainer.device=cpu", "--", "nothing.py")
    assert "dependency" not in done


def test_a_job_in_an_allocation_waits_for_nothing(workspace: Workspace) -> None:
    outside = workspace.hpc_rl("submit", "sft", "--in-allocation", *QUICK)
    assert outside.returncode == 2 and "no allocation found" in outside.stderr
    command = f"{shlex.quote(sys.executable)} -m hpc_rl.cli submit torchrun --in-allocation trainer.device=cpu"
    program = "-- nothing.py"
    script = f"{command} --nodes 3 {program}; {command} --nodes 2 --job-name inside {program}; "
    script += f"{command} {FAILS!r} --job-name fails {program}"
    done = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks=4", "--time=60", "bash", "-c", f"{script}; echo last $?"], timeout=DEADLINE_S,
        cwd=workspace.folder, env=dict(workspace.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "requests 3 nodes, but allocation" in done.stderr
    assert "last 2" in done.stdout, done.stdout + done.stderr
    status = workspace.status("inside")
    assert (status["state"], status["nodes"]) == ("COMPLETED", "node[1-2]")
    assert {path.name for path in (workspace.folder / "runs/inside/attempt-1").glob("*rank*.log")} == {
        "node0-rank0.log",
        "node1-rank1.log",
    }
    assert workspace.status("fails")["state"] == "FAILED"


def test_a_job_inside_a_job_step_that_holds_the_node_runs(workspace: Workspace) -> None:
    """As in `srun --pty bash`, or a Jupyter that srun has started. The second job waits for a step beside it."""
    python = shlex.quote(sys.executable)
    submit = f"{python} -m hpc_rl.cli submit torchrun trainer.device=cpu --in-allocation --job-name"
    inside = f"{submit} shares -- nothing.py; echo shared $?"
    busy = "srun bash -c 'touch busy; exec sleep 600' & until test -e busy; do sleep 0.1; done"
    waits = f"{submit} waits slurm.start_timeout_s=5 -- nothing.py; echo waited $?; kill $!"
    script = f"srun --ntasks=1 bash -c {shlex.quote(inside)}; {busy}; {waits}"
    done = subprocess.run(
        ["salloc", "--nodes=1", "--ntasks=1", "--exclusive", "--time=60", "bash", "-c", script], timeout=DEADLINE_S,
        cwd=workspace.folder, env=dict(workspace.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "shared 0" in done.stdout and "waited 1" in done.stdout, done.stdout + done.stderr
    assert "srun has started no task within 5 s (slurm.start_timeout_s)" in done.stdout
    assert workspace.status("waits")["state"] == "FAILED"


def test_a_job_in_an_allocation_is_cancelled_and_the_allocation_stays(workspace: Workspace) -> None:
    python = shlex.quote(sys.executable)
    command = f"{python} -m hpc_rl.cli submit torchrun --in-allocation --job-name held {' '.join(WAITING)}"
    with subprocess.Popen(
        ["salloc", "--nodes=1", "--ntasks=2", "bash", "-c", f"{command}; echo left $?; squeue -h -s"],
        cwd=workspace.folder, env=dict(workspace.environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as salloc:  # fmt: skip
        wait_for_line(workspace, workspace.folder / "runs" / "held", "attempt 1")
        assert workspace.status("held")["state"] == "RUNNING"
        assert workspace.ok("attach", "held", "hostname").startswith("node")
        workspace.ok("cancel", "held")
        said, _ = salloc.communicate(timeout=DEADLINE_S)
    assert "left 143" in said and said.rstrip().endswith("left 143"), said
    assert workspace.status("held")["state"] in ("FAILED", "CANCELLED")


def test_a_thousand_jobs_are_listed_by_two_questions(workspace: Workspace, slurm_cluster: Cluster) -> None:
    held = ["sbatch", "--parsable", "--hold", "--array=1-1000", "--output=/dev/null", "--wrap=true"]
    array = slurm_cluster.run(held, check=True).stdout.strip()
    many = workspace.folder / "many"
    for number in range(1, 1001):
        run = many / "runs" / f"run-{number:04}"
        run.mkdir(parents=True)
        job = {"job_id": f"{array}_{number}", "kind": "sft", "submitted": "2025-01-01"}
        (run / "job.json").write_text(json.dumps(job))
    counted = many / "bin"
    counted.mkdir()
    for program in ("sacct", "squeue", "scontrol", "sinfo"):
        (counted / program).write_text(f'#!/bin/sh\necho {program} >> {many}/calls\nexec /usr/bin/{program} "$@"\n')
        (counted / program).chmod(0o755)
    environ = {**workspace.environ, "PATH": f"{counted}:{os.environ['PATH']}"}
    found = rows(Workspace(many, environ))
    slurm_cluster.run(["scancel", array], check=True)
    assert [row["state"] for row in found] == ["PENDING"] * 1000
    assert (many / "calls").read_text().split() == ["sacct", "squeue"]


def test_the_table_with_accounting_knows_exit_codes(accounting_cluster: Cluster) -> None:
    folder = accounting_cluster.shared / f"ops-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "nothing.py").touch()
    accounted = Workspace(folder, {**accounting_cluster.env, "OMP_NUM_THREADS": "1"})
    words = ["sweep", "torchrun", "--job-name", "codes", *SETUPS, "trainer.device=cpu"]
    accounted.ok(*words, "--", "nothing.py")
    accounted.ok("submit", "torchrun", "--sbatch", "hold", "trainer.device=cpu", "--", "nothing.py")
    expected = [("codes_1", "COMPLETED", 0), ("codes_2", "FAILED", 2), ("torchrun-1", "PENDING", None)]

    def is_known() -> bool:  # accounting is updated a little later than the controller
        return [(row["run"], row["state"], row["exit_code"]) for row in rows(accounted)] == expected

    accounted.wait_until(is_known, f"{expected}")
    accounted.ok("cancel", "torchrun-1")
