"""The shipped pipelines on a real Slurm: three rounds, a cancelled job in each stage, a better model in each round."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.demo import make_model
from tests.e2e.workspace import Workspace
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.pipelines]
LENGTHS = ("data.max_prompt_length=24", "data.max_response_length=6")
COMMON = [
    *("model=runs/start/model", "prompts=prompts.jsonl", "test=data/val.jsonl", "reward=exact"),
    *(f"generate.{word}" for word in LENGTHS),
    *(f"eval.{word}" for word in LENGTHS),
    *("train.data.max_length=32", "train.optim.lr=3e-4", "train.optim.warmup_ratio=0.1"),
    *("train.trainer.total_epochs=15", "train.data.train_batch_size=32"),
    *(f"{stage}.trainer.device=cpu" for stage in ("generate", "train", "eval")),
]
OWN: dict[str, Sequence[str]] = {
    "rejection-sampling": ["select.select.method=threshold", "select.select.threshold=1"],
    "iterative-dpo": ["train.algorithm.sft_coeff=1"],
}
ENDED = ("COMPLETED", "CANCELLED")


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    """With a model that has learnt sums from a teacher with many mistakes."""
    folder = slurm_cluster.shared / f"rounds-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    workspace = Workspace(folder, {**slurm_cluster.env, "OMP_NUM_THREADS": "1"})
    make_model(folder / "model")
    workspace.ok("data", "arithmetic", "--out", "data", "--train", "8000", "--val", "80", "--careless", "0.7")
    prompts = (folder / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(dict.fromkeys(prompts[:400])))
    workspace.ok(
        *("submit", "sft", "--mem", "3G", "--job-name", "start", "--wait", "model.path=model", "trainer.device=cpu"),
        *("data.train_files=data/train.jsonl", "data.max_length=32", "data.train_batch_size=256", "optim.lr=1e-3"),
        "trainer.total_training_steps=300",
    )
    return workspace


def states(workspace: Workspace, name: str) -> dict[str, str]:
    found = {row["run"]: row["state"] for row in json.loads(workspace.ok("status", name, "--json"))}
    assert "FAILED" not in found.values(), found
    return found


@pytest.mark.parametrize("name", OWN)
def test_three_rounds_with_a_cancelled_job_in_each_stage(workspace: Workspace, name: str) -> None:
    workspace.ok("chain", name, "--rounds", "3", "--job-name", name, "--mem", "3G", *COMMON, *OWN[name])

    def cancel(run: str) -> bool:
        """Cancel a stage that runs, and continue; return whether it was cancelled before it had completed."""
        workspace.wait_until(lambda: states(workspace, name)[run] in ("RUNNING", *ENDED), f"{run} starts")
        workspace.ok("cancel", run)
        workspace.wait_until(lambda: states(workspace, name)[run] in ENDED, f"{run} ends")
        if states(workspace, name)[run] == "COMPLETED":
            return False
        workspace.wait_until(lambda: "PENDING" not in states(workspace, name).values(), "those after it leave")
        workspace.ok("requeue", name)
        return True

    cancelled = [cancel(f"{name}_1-{stage}") for stage in ("generate", "select", "train", "eval")]
    assert sum(cancelled) >= 3, "all but a selection take long enough to be cancelled"
    workspace.wait_until(lambda: set(states(workspace, name).values()) == {"COMPLETED"}, "all rounds completed")

    folder = workspace.folder / "runs" / name
    found = [json.loads((folder / f"{name}_{number}-eval" / "eval.json").read_text()) for number in range(4)]
    scores = [each["data"][0]["metrics"]["score"]["value"] for each in found]
    print(f"{name}: {scores}")
    assert all(later > earlier for earlier, later in pairwise(scores)), scores
    workspace.ok("report", name)
    assert f"<h1>pipeline {name}</h1>" in (folder / "report.html").read_text()
