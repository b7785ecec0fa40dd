"""Agents on a real Slurm: beside the run, and in a job of their own on another node."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pytest

from tests.e2e.test_ppo_on_slurm import PPO, records, scores
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

AGENT = """\
import json, os, pathlib, sys
from openai import APIConnectionError, InternalServerError, OpenAI

if sys.argv[1:]:
    found = json.loads(pathlib.Path(sys.argv[1]).read_text())
    os.environ |= {"OPENAI_BASE_URL": found["base_url"], "OPENAI_API_KEY": found["api_key"]}
run = OpenAI()
try:
    while True:
        session = run.post("/sessions", cast_to=object)
        if session is None:
            continue
        policy = OpenAI(base_url=session["base_url"])
        said = policy.chat.completions.create(model="policy", messages=session["messages"]).choices[0].message.content
        score = sum(map(str.isdigit, said)) / max(1, len(said))
        run.post(f"/sessions/{session['id']}/reward", cast_to=object, body={"reward": score})
except (APIConnectionError, InternalServerError) as error:
    print("the run has ended:", error)
"""
REPLACED = ("reward.", "data.train_batch_size", "actor.mini_batch_size")
OPTIONS = [
    *(option for option in PPO if not option.startswith(REPLACED)),
    *("algorithm=grpo", "data.train_batch_size=8", "actor.mini_batch_size=32"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    folder = slurm_cluster.shared / f"agents-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    workspace = Workspace(folder, {**slurm_cluster.env, "OMP_NUM_THREADS": "1"})
    make_tiny_model(folder / "model", hidden=64, layers=2)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (folder / "agent.py").write_text(AGENT)
    return workspace


@pytest.mark.long
def test_an_agent_in_a_job_of_its_own_and_then_beside_the_run(workspace: Workspace) -> None:
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", "served", *OPTIONS]
    endless = ["agent.endpoint=network", "trainer.total_training_steps=1000"]  # it cannot end before it is stopped
    workspace.ok(*command, *endless, "--sbatch", "nodelist=node[1-2]")
    endpoint: Path = workspace.folder / "runs" / "served" / "endpoint.json"
    workspace.wait_until(endpoint.exists, "the endpoint")
    assert endpoint.stat().st_mode & 0o777 == 0o600
    found = json.loads(endpoint.read_text())
    assert "127.0.0.1" not in found["base_url"]
    elsewhere = ["--sbatch", "nodelist=node4", "trainer.device=cpu"]
    workspace.ok(
        "submit", "torchrun", "--nodes", "1", "--job-name", "agent", *elsewhere, "--", "agent.py", str(endpoint)
    )
    metrics = workspace.folder / "runs" / "served" / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and len(scores(workspace, "served")) >= 2, "2 steps")
    workspace.ok("stop", "served")
    workspace.wait_until(lambda: workspace.status("served")["state"] == "STOPPED", "stopped")
    workspace.wait_until(lambda: workspace.status("agent")["state"] == "COMPLETED", "the end of the agent")
    assert not endpoint.exists()

    last = int(str(workspace.status("served")["step"])) + 3
    own = ["agent.endpoint=loopback", f"agent.command=[{sys.executable},agent.py]", "agent.processes=2"]
    workspace.ok(*command, *own, f"trainer.total_training_steps={last}", "--wait")
    status = workspace.status("served")
    assert (status["state"], status["exit_code"], status["step"]) == ("COMPLETED", 0, last)
    assert list(scores(workspace, "served")) == list(range(1, last + 1))
    steps = [record for record in records(workspace, "served") if "critic/score/mean" in record]
    assert all(record["environment/errors"] == 0 for record in steps)
    folder = workspace.folder / "runs" / "served"
    assert {path.name for path in folder.glob("attempt-2/*agent*.log")} == {"node0-agent0.log", "node0-agent1.log"}
    for file in folder.rglob("*"):
        assert not file.is_file() or found["api_key"].encode() not in file.read_bytes(), file
