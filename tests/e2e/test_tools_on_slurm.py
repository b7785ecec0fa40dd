"""Conversations with tools on a real Slurm: a calculator on two nodes, and programs that try to do harm."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.calling_model import make_calling_model
from tests.e2e.test_ppo_on_slurm import records, scores
from tests.e2e.test_ray_on_slurm import traces
from tests.e2e.workspace import Workspace
from tests.environments.runners import reachable_path
from tests.sandbox import network, state
from tests.sandbox.cluster import Cluster
from tests.sandbox.config import SLURMCTLD_PORT

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
SLEEP_S = 9731
"""A time that no other process sleeps for."""
PPO = [
    *("model.path=model", "data.train_files=sums.jsonl", "trainer.device=cpu", "algorithm=grpo"),
    *("data.max_prompt_length=64", "actor.optim.lr=3e-2", "actor.optim.lr_scheduler=constant"),
]


def workspace_on(cluster: Cluster, texts: list[str], **environ: str) -> Workspace:
    """Create a folder with a model that writes one of these texts in each turn, and with sums whose answer is 3."""
    folder = cluster.shared / f"tools-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    make_calling_model(folder / "model", texts)
    row = {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}
    (folder / "sums.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    return Workspace(folder, {**cluster.env, "OMP_NUM_THREADS": "1", **environ})


@pytest.mark.long
def test_a_calculator_on_two_nodes_is_resumed_after_a_kill(slurm_cluster: Cluster) -> None:
    """The model calls the tool or answers, both at random, and is rewarded for an answer within two turns."""
    workspace = workspace_on(slurm_cluster, [ADD, "3"])
    own = ["environment.name=hpc_rl.environments.calculator:Calculator", "environment.max_turns=2"]
    sizes = ["data.max_response_length=64", "data.train_batch_size=16", "rollout.n=4", "trainer.save_freq=1"]
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", "sums", *PPO, *own, *sizes]
    workspace.ok(*command, "trainer.total_training_steps=1000")  # it cannot end before it is killed
    metrics = workspace.folder / "runs" / "sums" / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and len(scores(workspace, "sums")) >= 3, "3 steps")
    attempt = workspace.folder / "runs" / "sums" / "attempt-1"
    assert {path.name for path in attempt.glob("*-environments.log")} == {
        "node0-environments.log",
        "node1-environments.log",
    }
    slurm_cluster.exec_on("node2", ["pkill", "-KILL", "-f", "--", "^ray::Worker"], check=True)
    workspace.wait_until(lambda: workspace.status("sums")["state"] == "FAILED", "the job ends")
    slurm_cluster.wait_idle()

    last = max(12, int(str(workspace.status("sums")["step"])) + 2)
    workspace.ok(*command, f"trainer.total_training_steps={last}", "--wait")
    status = workspace.status("sums")
    assert (status["state"], status["exit_code"], status["step"]) == ("COMPLETED", 0, last)
    found = scores(workspace, "sums")
    assert list(found) == list(range(1, last + 1))
    assert max(found.values()) > 0.9, "it learns; a step of this size may also lose it again"
    for record in records(workspace, "sums"):
        if "critic/score/mean" in record:
            assert 1 <= record["environment/turns/mean"] <= 2 and record["environment/bad_calls"] == 0
            assert record["environment/errors"] == 0
    assert records(workspace, "sums")[0]["environment/tool_calls"] > 0.5


def own_traces(cluster: Cluster) -> dict[str, list[str]]:
    """Return the traces of jobs on the nodes, without the folder in which torch's workers look for compiled code."""
    found = {node: text.splitlines() for node, text in traces(cluster).items()}
    return {node: [line for line in lines if "torchinductor" not in line] for node, lines in found.items()}


@pytest.fixture
def apptainer_path(slurm_cluster: Cluster, apptainer_environ: dict[str, str]) -> Iterator[str]:
    """A PATH with an apptainer that the user nobody can run on all nodes."""
    program = Path(str(shutil.which("apptainer", path=apptainer_environ["PATH"])))
    environ = {"PATH": f"{slurm_cluster.env['PATH']}:{program.parent}"}
    with reachable_path(environ, slurm_cluster.shared) as path:
        yield path


@pytest.mark.long
def test_programs_that_do_harm_end_with_their_call(slurm_cluster: Cluster, apptainer_path: str) -> None:
    """Each turn calls all of them: a fork bomb, a full disk, endless output, sleepers and a connection."""
    address = f"{state.read(slurm_cluster.name).subnet}.{network.CONTROLLER}/{SLURMCTLD_PORT}"
    programs = [
        f"b() {{ b | b & }}; b; sleep {SLEEP_S}",
        "for name in 1 2 3; do head -c 30M /dev/zero > /tmp/$name; done; du -sm /tmp | cut -f 1",
        "yes",
        f"setsid sleep {SLEEP_S} & sleep {SLEEP_S}",
        f"(exec 3<> /dev/tcp/{address}) && echo CONNECTED",
    ]
    calls = [json.dumps({"name": "bash", "arguments": {"command": program}}) for program in programs]
    text = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    workspace = workspace_on(slurm_cluster, [text], PATH=apptainer_path)
    before = own_traces(slurm_cluster)
    own = ["environment.tools=[bash]", "environment.sandbox=apptainer", "environment.max_turns=2"]
    own += ["environment.max_output_chars=200", "environment.timeout_s=600", "data.max_response_length=1900"]
    sizes = ["data.train_batch_size=2", "rollout.n=2", "trainer.micro_tokens=8192", "trainer.total_training_steps=2"]
    reward = ["reward.function=format", "reward.kwargs={pattern: '.*'}"]
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", "harm", "--wait"]
    workspace.ok(*command, *PPO, *own, *sizes, *reward)
    found = [record for record in records(workspace, "harm") if "critic/score/mean" in record]
    assert [record["environment/tool_calls"] for record in found] == [10, 10]
    assert all(record["environment/errors"] == record["environment/bad_calls"] == 0 for record in found)
    rows = [json.loads(line) for line in (workspace.folder / "runs/harm/samples.jsonl").read_text().splitlines()]
    for row in rows:
        said = row["response"]
        assert said.count("[ended: it used more than") >= 3 and "No space left on device" in said
        assert "\n64\n" in said and "CONNECTED" not in said.replace("echo CONNECTED", "")
    assert rows
    slurm_cluster.wait_idle()
    for node in slurm_cluster.nodes:
        left = slurm_cluster.exec_on(node, ["pgrep", "-fa", f"sleep {SLEEP_S}|apptainer|^yes"])
        assert left.stdout == "", f"left on {node}"
    assert own_traces(slurm_cluster) == before
