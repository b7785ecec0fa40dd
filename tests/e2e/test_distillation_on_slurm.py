"""Distillation on a real Slurm: two nodes, stopped, resumed on one node, exported."""

from __future__ import annotations

import shutil
import uuid

import pytest
import torch

from tests.e2e.workspace import Workspace, make_workspace
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
OPTIONS = [
    *("model.path=model", "teacher.path=teacher", "data.train_files=raw.jsonl", "data.val_files=raw.jsonl"),
    *("data.prompt_key=question", "data.response_key=answer", "data.max_length=256", "data.train_batch_size=8"),
    *("trainer.device=cpu", "optim.lr=1e-2", "trainer.total_training_steps=8"),
]
STORED = ("teacher.top_k=8", "teacher.precompute_top_k=true")


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    from transformers import AutoModelForCausalLM

    made = make_workspace(slurm_cluster.shared / f"distill-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    folder = make_tiny_model(made.folder / "teacher", hidden=48)
    teacher = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(teacher.lm_head.weight, std=0.3)
    teacher.save_pretrained(folder)
    return made


@pytest.mark.parametrize(("name", "more"), [long("live", ()), long("stored", STORED)])
def test_stopped_on_two_nodes_and_resumed_on_one(workspace: Workspace, name: str, more: tuple[str, ...]) -> None:
    options = [*OPTIONS, *more]
    workspace.ok("submit", "distill", "--nodes", "2", "--job-name", name, *options, *workspace.hold_at(3))
    workspace.wait_for_step(name, 3)
    workspace.ok("stop", name)
    workspace.wait_until(lambda: workspace.status(name)["state"] == "STOPPED", "stopped")
    run = workspace.folder / "runs" / name
    written = [file.stat().st_mtime_ns for file in run.glob("teacher_top_k/*/*.npy")]
    assert bool(written) == (name == "stored")
    workspace.ok("submit", "distill", "--nodes", "1", "--job-name", name, "--wait", *options)
    status = workspace.status(name)
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 8, 2)
    losses = workspace.losses(name)
    assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1]
    workspace.ok("submit", "distill", "--nodes", "1", "--job-name", f"whole-{name}", "--wait", *options)
    assert losses == pytest.approx(workspace.losses(f"whole-{name}"), abs=1e-4)
    assert [file.stat().st_mtime_ns for file in run.glob("teacher_top_k/*/*.npy")] == written, "they were used again"
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    report = (run / "report.html").read_text()
    assert "Divergence" in report and "from the teacher" in report


def test_another_teacher_is_refused_before_the_job_is_queued(workspace: Workspace) -> None:
    strange = make_tiny_model(workspace.folder / "strange", vocab=300)
    command = ["submit", "distill", "--nodes", "1", "--job-name", "no", *OPTIONS, f"teacher.path={strange}"]
    done = workspace.hpc_rl(*command)
    assert done.returncode == 2 and "have different vocabularies" in done.stderr, done.stderr
    assert not (workspace.folder / "runs" / "no").exists()
    shutil.rmtree(strange)
