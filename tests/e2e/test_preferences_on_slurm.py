"""DPO and a reward model on a real Slurm: two nodes, stopped, resumed on one node, exported."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.e2e.workspace import QUESTIONS, Workspace, make_workspace
from tests.marks import long
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
OPTIONS = [
    *("model.path=model", "data.train_files=pairs.jsonl", "data.val_files=pairs.jsonl", "trainer.device=cpu"),
    *("data.max_length=256", "data.train_batch_size=8", "optim.lr=1e-3", "trainer.total_training_steps=8"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    made = make_workspace(slurm_cluster.shared / f"preferences-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    rows = [
        {"prompt": row["question"], "chosen": row["answer"][-40:], "rejected": "I do not know."} for row in QUESTIONS
    ]
    (made.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.mark.parametrize("kind", [long("dpo"), long("rm")])
def test_stopped_on_two_nodes_and_resumed_on_one(workspace: Workspace, kind: str) -> None:
    workspace.ok("submit", kind, "--nodes", "2", "--job-name", kind, *OPTIONS, *workspace.hold_at(3))
    workspace.wait_for_step(kind, 3)
    workspace.ok("stop", kind)
    workspace.wait_until(lambda: workspace.status(kind)["state"] == "STOPPED", "stopped")
    run = workspace.folder / "runs" / kind
    written = [path.stat().st_mtime_ns for path in run.glob("ref_logprobs/*/*.npy")]
    assert bool(written) == (kind == "dpo")
    workspace.ok("submit", kind, "--nodes", "1", "--job-name", kind, "--wait", *OPTIONS)
    status = workspace.status(kind)
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 8, 2)
    losses = workspace.losses(kind)
    assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1]
    workspace.ok("submit", kind, "--nodes", "1", "--job-name", f"whole-{kind}", "--wait", *OPTIONS)
    whole = workspace.losses(f"whole-{kind}")
    assert losses == pytest.approx(whole, abs=1e-4)
    used = [path.stat().st_mtime_ns for path in run.glob("ref_logprobs/*/*.npy")]
    assert used == written, "the resumed run used the stored log-probabilities"
    import transformers

    auto = {"dpo": "AutoModelForCausalLM", "rm": "AutoModelForSequenceClassification"}[kind]
    folder = workspace.folder / "runs" / kind / "model"
    _, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
