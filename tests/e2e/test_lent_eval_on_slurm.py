"""Nodes of another job score the checkpoints of a run while it trains (`hpc-rl lend --role eval`), on a real Slurm."""

import uuid
from pathlib import Path

import pytest

import hpc_rl
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.points import read_points
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.long]
REWARD = """\
import zlib

def score(response: str, answer: str) -> float:
    return zlib.crc32(response.encode()) % 1000 / 1000
"""
EVAL = [
    *("data.files=prompts.jsonl", "data.prompt_key=question", "reward.function=reward.py:score", "rollout.n=2"),
    *("data.max_prompt_length=128", "data.max_response_length=6", "data.max_prompts=8", "slurm.mem=3G"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    workspace = make_workspace(slurm_cluster.shared / f"follow-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    (workspace.folder / "reward.py").write_text(REWARD)
    (workspace.folder / "raw.jsonl").rename(workspace.folder / "prompts.jsonl")
    return workspace


def points(workspace: Workspace) -> dict[int, float]:
    found = read_points(workspace.folder / "runs/math")
    return {step: values["eval/score"] for step, values in found.items()}


def test_checkpoints_are_scored_beside_a_training(workspace: Workspace, slurm_cluster: Cluster) -> None:
    steps = ["trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=9"]
    held = workspace.hold_at("4-5", str(Path(hpc_rl.__file__).parents[1]))  # the lender has the run's variables
    workspace.ok("submit", "sft", "--job-name", "math", *QUICK, *steps, "slurm.mem=2G", *held)
    asked = workspace.hpc_rl("lend", "math", "--role", "eval")
    assert asked.returncode == 2 and asked.stderr.endswith(": add data.files=FILE reward.function=NAME\n")
    workspace.ok("lend", "math", "--role", "eval", *EVAL)
    workspace.wait_until(lambda: points(workspace).keys() == {2, 4}, "scores of two checkpoints")
    assert workspace.status("math")["state"] == "RUNNING"
    lender = str(workspace.status("math-eval-1")["job_id"])
    slurm_cluster.run(["scancel", "--signal=TERM", lender], check=True)  # as Slurm does with a GraceTime
    workspace.wait_until(lambda: workspace.status("math-eval-1")["attempt"] == 2, "the lender, queued again")
    workspace.release("math")
    assert workspace.hpc_rl("logs", "-f", "math").returncode == 0, workspace.logs()
    workspace.wait_until(lambda: workspace.status("math-eval-1")["state"] == "COMPLETED", "the end of the lender")
    ended = [RunDir(workspace.folder / "runs" / run).status.stat().st_mtime for run in ("math", "math-eval-1")]
    scored = max(path.stat().st_mtime for path in workspace.folder.glob("runs/math/metrics-eval-*"))
    assert ended[1] - max(ended[0], scored) < 60
    lines = [path.read_text().splitlines() for path in workspace.folder.glob("runs/math/metrics-eval-*")]
    assert len(lines) == 1 and len(lines[0]) == 3  # none twice
    workspace.ok("export", "runs/math/checkpoints/step-00000004", "exported")
    workspace.ok("submit", "eval", "--job-name", "alone", "model.path=exported", "trainer.device=cpu", *EVAL, "--wait")
    score = workspace.status("alone")["metrics"]
    assert isinstance(score, dict) and points(workspace)[4] == score["eval/score"] != points(workspace)[6]
    assert "eval/score" in workspace.ok("metrics", "math", "--csv").splitlines()[0]
    again = workspace.hpc_rl("lend", "math", "--role", "eval", *EVAL)
    assert again.returncode == 2 and "its checkpoints have scores of this evaluation" in again.stderr
