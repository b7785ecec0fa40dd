"""Generation on a real Slurm: two nodes, stopped and resumed; a selection and an evaluation as jobs."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
N, PROMPTS = 4, 60
REWARD = '''\
"""Writes down what it scores. It fails for the first prompt, and waits from the fifth block on until it may go on."""
import pathlib, time

FOLDER = pathlib.Path(__file__).parent

def score(response: str, answer: str, row: dict) -> float:
    number = row["number"]
    with (FOLDER / "scored.txt").open("a") as log:
        log.write(f"{number}\\n")
    deadline = time.monotonic() + 900
    while number >= 20 and not (FOLDER / "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if number == 0:
        raise ValueError("this prompt cannot be scored")
    return float(len(set(response)) % 2)
'''
OPTIONS = [
    *("model.path=model", "data.files=prompts.jsonl", "trainer.device=cpu", "data.max_prompt_length=64"),
    *("data.max_response_length=8", "reward.function=reward.py:score", "reward.timeout_s=1000", "reward.workers=1"),
    *(f"rollout.n={N}", "rollout.max_num_seqs=16"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    folder = slurm_cluster.shared / f"generate-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    workspace = Workspace(folder, {**slurm_cluster.env, "OMP_NUM_THREADS": "1"})
    make_tiny_model(folder / "model", hidden=32, layers=2)
    rows = [
        {"messages": [{"role": "user", "content": f"{i} + 1?"}], "answer": str(i + 1), "number": i} for i in range(60)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return workspace


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(scored: Path) -> list[int]:
    """Return which prompts the reward function has been called for."""
    return [int(line) for line in scored.read_text().splitlines()] if scored.exists() else []


def test_generated_on_two_nodes_stopped_and_resumed(workspace: Workspace) -> None:
    command = ["submit", "generate", "--nodes", "2", "--mem", "4G", "--job-name", "many", *OPTIONS]
    run, scored = workspace.folder / "runs" / "many", workspace.folder / "scored.txt"
    workspace.ok(*command)
    parts = run / "response-parts"
    workspace.wait_until(lambda: any(number >= 20 for number in numbers(scored)), "a block of the second half")
    before = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.jsonl")}
    assert before and not (run / "responses.jsonl").exists()
    finished = {row["index"] for name in before for row in read(parts / name)}
    workspace.ok("stop", "many")
    workspace.wait_until(lambda: "stopped after block" in workspace.logs(), "the driver stops")
    workspace.wait_until(lambda: workspace.status("many")["state"] == "STOPPED", "stopped, without the block's scores")
    (workspace.folder / "go").touch()

    left = {path.name for path in parts.glob("*.jsonl")}
    assert before.keys() <= left and len(left) < PROMPTS * N / 16
    workspace.ok(*command, "--wait")
    status = workspace.status("many")
    assert (status["state"], status["attempt"], status["step"]) == ("COMPLETED", 2, PROMPTS * N // 16)
    rows = read(run / "responses.jsonl")
    assert [(row["index"], row["sample"]) for row in rows] == [(i, k) for i in range(PROMPTS) for k in range(N)]
    assert [row["score"] is None for row in rows] == [row["index"] == 0 for row in rows]
    times = Counter(numbers(scored))
    assert all(times[index] == N for index in finished), "no finished block was scored, and so generated, again"
    assert not list(parts.glob("*.jsonl"))
    logs = {path.name for path in (run / "attempt-2").glob("*engine*.log")}
    assert {name.split("-")[0] for name in logs} == {"node0", "node1"}


def test_responses_are_selected(workspace: Workspace) -> None:
    """As a job, which reads what the test above has generated."""
    rows = read(workspace.folder / "runs" / "many" / "responses.jsonl")
    options = ["select.responses=runs/many/responses.jsonl", "select.method=pairs"]
    workspace.ok("submit", "select", "--mem", "2G", "--job-name", "pairs", "--wait", *options)
    pairs = read(workspace.folder / "runs" / "pairs" / "selected.jsonl")
    different = {row["index"] for row in rows if row["score"] == 1} & {
        row["index"] for row in rows if row["score"] == 0
    }
    assert len(pairs) == len(different) > 0 and all(pair["margin"] == 1 for pair in pairs)
    workspace.ok("data", "select", "runs/many/responses.jsonl", "--pairs", "--output", "pairs.jsonl")
    assert read(workspace.folder / "pairs.jsonl") == pairs


@pytest.mark.long
def test_a_model_is_evaluated(workspace: Workspace) -> None:
    (workspace.folder / "go").touch()
    words = [word for word in OPTIONS if not word.startswith(("model.path", "data.files"))]
    shown = workspace.ok("eval", "model", "data=prompts.jsonl", "--mem", "4G", "--job-name", "scores", "--wait", *words)
    (data,) = json.loads((workspace.folder / "runs" / "scores" / "eval.json").read_text())["data"]
    responses = read(workspace.folder / "runs" / "scores" / "responses.jsonl")
    values = [row["score"] for row in responses if row["score"] is not None]
    assert data["metrics"]["score"]["value"] == pytest.approx(sum(values) / len(values))
    assert data["failed"] == N and data["metrics"][f"pass@{N}"]["prompts"] == PROMPTS - 1
    assert f"{data['metrics']['pass@1']['value']:.3f} [" in shown
