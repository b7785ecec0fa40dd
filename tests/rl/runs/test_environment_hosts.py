"""Environments in the actors of several nodes; here, all of them are on this node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from hpc_rl.environments.pool import Conversation
from hpc_rl.environments.requests import EnvironmentSpec
from hpc_rl.environments.tool_calls import ToolCall
from hpc_rl.errors import RunError, UserError
from hpc_rl.formats.offer import LentEnvironments, read_lent_environments
from hpc_rl.rl.actors.pools import ClusterNode, cluster_nodes
from hpc_rl.rl.converse import environment_hosts
from hpc_rl.rl.converse.environment_hosts import EnvironmentFleet, nodes_of_job, open_environments
from tests.environments.test_pool import OWN
from tests.rl.ppo_config import ppo_config
from tests.rl.runs.jobs import TIMEOUT_S, Runs, metrics
from tests.rl.runs.test_environments import ADDS, SUMS, calling

PROMPT = [{"role": "user", "content": "1 + 2?"}]
Open = Callable[..., EnvironmentFleet]


@pytest.fixture
def opened(cluster: None, tmp_path: Path) -> Iterator[Open]:
    """Open the environments of two actors; they are closed after the test."""
    fleets = []

    def opener(source: str = OWN, timeout_s: float = TIMEOUT_S) -> EnvironmentFleet:
        (tmp_path / "own.py").write_text(source)
        wanted = EnvironmentSpec(f"{tmp_path}/own.py:Own", {}, [], 1000)
        fleets.append(EnvironmentFleet(wanted, 1, timeout_s, cluster_nodes() * 2, tmp_path))
        return fleets[-1]

    yield opener
    for fleet in fleets:
        fleet.close()


def said(future: Any) -> list[str]:
    return [message["content"] for message in future.result(TIMEOUT_S).messages]


def begun(fleet: EnvironmentFleet, **row: Any) -> Conversation:
    talk = fleet.start(PROMPT, row)
    assert said(talk.first) == ["1 + 2?\n\nGo."]
    return talk


def pid_of(talk: Conversation) -> int:
    return int(said(talk.answer("", [ToolCall("pid", {})]))[0])


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_conversations_are_spread_over_the_nodes_and_keep_their_own_state(opened: Open, tmp_path: Path) -> None:
    fleet = opened()
    assert fleet.workers == 2 and fleet.offered.has_reward and len(fleet.offered.schemas) == 8
    talks = [begun(fleet, start=start) for start in (1, 10, 100)]
    pids = [pid_of(talk) for talk in talks]
    assert pids[0] == pids[2] != pids[1]
    assert [said(talk.answer("", [ToolCall("add", {"x": 2})])) for talk in talks] == [["3"], ["12"], ["102"]]
    assert talks[1].finish().result(TIMEOUT_S).score == 12
    assert pid_of(begun(fleet)) == pids[1], "the node with the fewest"
    assert (tmp_path / "node0-environments.log").exists()
    fleet.close()
    for pid in pids:
        wait_for_end(pid)
    with pytest.raises(RunError, match="were closed"):
        fleet.start(PROMPT, {})
    fleet.close()


def test_what_goes_wrong_ends_its_conversation(opened: Open) -> None:
    fleet = opened(timeout_s=60)
    failing, fine = fleet.start(PROMPT, {"start": "raise"}), begun(fleet, start=5)
    assert failing.first.result(TIMEOUT_S).error == failing.finish().result(TIMEOUT_S).error == "RuntimeError: no start"
    hanging = begun(fleet)
    before = pid_of(hanging)
    reply = hanging.answer("", [ToolCall("hang", {})]).result(TIMEOUT_S)
    assert reply.done and reply.error == "the environment took over 60 s and was ended"
    wait_for_end(before)
    assert hanging.finish().result(TIMEOUT_S).error == reply.error
    assert fine.finish().result(TIMEOUT_S).score == 5.0, "on the other node"
    sent = fleet.start(PROMPT, {"row": lambda: None})
    assert "cannot be passed on: " in (sent.first.result(TIMEOUT_S).error or "")
    unsendable = fleet.start(PROMPT, {"row": (each for each in ())})
    assert "cannot be passed on: " in (unsendable.first.result(TIMEOUT_S).error or "")
    assert begun(fleet, start=7).finish().result(TIMEOUT_S).score == 7.0


def test_a_node_that_is_lost_takes_only_its_conversations_with_it(
    opened: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = opened()
    talks = [begun(fleet, start=start) for start in (1, 2)]
    pids = [pid_of(talk) for talk in talks]
    waiting = talks[0].answer("", [ToolCall("wait", {"seconds": 600})])
    kill(fleet._hosts[0], signal.SIGKILL)
    lost = waiting.result(TIMEOUT_S)
    assert lost.done and lost.error is not None and lost.error.startswith("the environments on node ")
    wait_for_end(pids[0])
    assert talks[0].finish().result(TIMEOUT_S).error == lost.error
    assert talks[1].finish().result(TIMEOUT_S).score == 2
    assert [pid_of(begun(fleet)) for _ in range(3)] == [pids[1]] * 3
    assert capsys.readouterr().out.count("their conversations have no score, and other nodes go on") == 1
    kill(fleet._hosts[1], signal.SIGKILL)  # ray.kill returns before the actor ends
    assert fleet.start(PROMPT, {}).first.result(TIMEOUT_S).error
    with pytest.raises(RunError, match=r"^no process for environments is left: the environments on node .* are lost"):
        fleet.start(PROMPT, {})


def kill(host: Any, number: int) -> None:
    os.kill(ray.get(host._actor.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S), number)


def test_a_node_that_was_lost_while_idle_takes_no_conversation_with_it(opened: Open) -> None:
    fleet = opened()
    kill(fleet._hosts[0], signal.SIGKILL)
    talks = [fleet.start(PROMPT, {"start": start}) for start in range(4)]
    assert [said(talk.first) for talk in talks] == [["1 + 2?\n\nGo."]] * 4
    assert [talk.finish().result(TIMEOUT_S).score for talk in talks] == [0, 1, 2, 3]


def test_a_node_that_does_not_answer_is_lost(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = opened()
    talks = [begun(fleet, start=start) for start in (1, 2)]
    pid = ray.get(fleet._hosts[0]._actor.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(environment_hosts, "ALIVE_TIMEOUT_S", 2.0)
        lost = talks[0].answer("", [ToolCall("pid", {})]).result(TIMEOUT_S)
        monkeypatch.undo()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert lost.done and str(lost.error).endswith(" are lost: no answer within 2 s")
    assert talks[0].finish().result(TIMEOUT_S).error == lost.error
    assert talks[1].finish().result(TIMEOUT_S).score == 2
    wait_for_end(pid)


def test_a_node_that_cannot_replace_a_process_is_lost(opened: Open, tmp_path: Path) -> None:
    fleet = opened()
    talks = [begun(fleet, start=start) for start in (1, 2)]
    (tmp_path / "own.py").write_text("import os\nos._exit(4)\nclass Own: ...\n")
    assert (
        talks[0].answer("", [ToolCall("die", {})]).result(TIMEOUT_S).error == "the environment ended with exit code 3"
    )
    assert talks[0].finish().result(TIMEOUT_S).error
    assert begun(fleet, start=3).finish().result(TIMEOUT_S).score == 3, "on the other node"
    assert "a process ended with exit code 4 while it loaded it" in str(fleet._hosts[0].lost)
    assert talks[1].finish().result(TIMEOUT_S).score == 2


def test_closing_ends_what_runs(opened: Open) -> None:
    fleet = opened()
    talk = begun(fleet)
    pid, waiting = pid_of(talk), talk.answer("", [ToolCall("wait", {"seconds": 600})])
    fleet.close()
    with pytest.raises(RunError, match="were closed"):
        waiting.result(TIMEOUT_S)
    wait_for_end(pid)


def test_an_environment_that_cannot_be_loaded(opened: Open) -> None:
    with pytest.raises(UserError, match=r"^on node \S+: .*no 'Own' in"):
        opened("class Other: ...")


def test_a_lent_node_takes_conversations_and_leaves(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (own,) = cluster_nodes()
    far = {replace(own, name="far"): "41"}
    lent: dict[ClusterNode, str] = {}
    monkeypatch.setattr(environment_hosts, "lent_for_environments", lambda: dict(lent))
    monkeypatch.setattr(environment_hosts, "LOOK_S", 0.05)
    (tmp_path / "own.py").write_text(OWN)
    wanted = EnvironmentSpec(f"{tmp_path}/own.py:Own", {}, [], 1000)
    fleet = EnvironmentFleet(wanted, 1, TIMEOUT_S, [own], tmp_path, takes_lent=True)
    try:
        lent |= far
        wait_until(lambda: fleet.workers == 2)
        talks = [begun(fleet, start=start) for start in (1, 2)]
        pids = [pid_of(talk) for talk in talks]
        assert pids[0] != pids[1] and (tmp_path / "node0-lent41-environments.log").exists()
        wait_until(lambda: read_lent_environments(tmp_path) == [LentEnvironments("41", "far", 1, 1)])
        lent.clear()
        wait_until(lambda: fleet.workers == 1)
        error = talks[1].answer("", [ToolCall("pid", {})]).result(TIMEOUT_S).error
        assert "the environments on node far (job 41) are lost: its job has ended" in str(error)
        assert talks[1].finish().result(TIMEOUT_S).error and talks[0].finish().result(TIMEOUT_S).score == 1
        assert begun(fleet, start=3).finish().result(TIMEOUT_S).score == 3
        assert read_lent_environments(tmp_path) == [LentEnvironments("41", "far", 0, 1)]
        (tmp_path / "own.py").write_text("class Other: ...")  # as on a node without what the environment needs
        lent |= {replace(own, name="bare"): "42"}
        wait_until(lambda: "the environments on node bare (job 42) are lost: " in capfd.readouterr().out)
        assert fleet.workers == 1
    finally:
        fleet.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_of_one_node_needs_no_actor(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = ppo_config(f"environment.name={tmp_path}/own.py:Own", "environment.workers=1")
    (own,) = nodes_of_job(3)
    assert own.id == ray.get_runtime_context().get_node_id() and nodes_of_job(0) == []
    far = ClusterNode("far", "far", 1, 0, 1)
    monkeypatch.setattr(environment_hosts, "cluster_nodes", lambda: [far, own, far])
    assert nodes_of_job(2) == [own, far]
    monkeypatch.setattr(environment_hosts, "cluster_nodes", lambda: [own, own, own])
    pool, fleet = "EnvironmentPool", "EnvironmentFleet"
    for nodes, is_open, kind, workers in ((1, False, pool, 1), (1, True, fleet, 1), (2, False, fleet, 2)):
        monkeypatch.setattr(environment_hosts, "takes_lent_nodes", lambda logs, is_open=is_open: is_open)
        found = open_environments(config.updated("trainer.nnodes", nodes), tmp_path)
        assert (type(found).__name__, found.workers) == (kind, workers)
        found.close()


def test_a_run_on_two_nodes(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.py"
    own.write_text(ADDS)
    nodes = cluster_nodes()
    monkeypatch.setattr(environment_hosts, "nodes_of_job", lambda count: nodes * count)
    form = ("environment.tool_format=hermes", f"environment.name={own}:Adds", "environment.workers=1")
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}</tool_call>' for a in range(len(SUMS))]
    runs = calling(run, tmp_path, calls, *form, "trainer.nnodes=2")
    assert runs(tmp_path / "run", "data.val_files=[]") == 0
    for step in metrics(tmp_path / "run"):
        assert step["environment/tool_calls"] == 2 and step["environment/errors"] == 0
        assert {step["critic/score/min"], step["critic/score/max"]} <= {4, 5, 6}
