"""What comes out of a call when an actor fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors import calls as calls_module
from hpc_rl.rl.actors.calls import ActorCall, Pending, wait_for_all
from hpc_rl.rl.actors.deaths import ActorLabel
from tests.rl.runs.jobs import TIMEOUT_S
from tests.rl.runs.member import Member


@pytest.fixture
def members(cluster: None) -> list[Any]:
    actor = ray.remote(num_cpus=0)(Member)
    started = [actor.remote() for _ in range(2)]
    ray.get([member.pid.remote() for member in started], timeout=TIMEOUT_S)
    return started


def called(members: list[Any], method: str, *arguments: Any) -> list[ActorCall]:
    return [
        ActorCall(getattr(member, method).remote(*arguments), ActorLabel(f"rank {i} of pool test", "worker"))
        for i, member in enumerate(members)
    ]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_results_are_in_order_and_combined(members: list[Any]) -> None:
    calls = [ActorCall(members[i % 2].give.remote(i), ActorLabel("somebody", "worker")) for i in range(6)]
    assert Pending.of_calls(calls).wait(TIMEOUT_S) == [0, 1, 2, 3, 4, 5]
    assert Pending.of_calls(called(members, "give", 4)).then(sum).wait(TIMEOUT_S) == 8


def test_the_users_mistake_comes_out_as_it_was(members: list[Any]) -> None:
    with pytest.raises(UserError, match=r"^give less$") as caught:
        Pending.of_calls(called(members, "refuse", False)).wait(TIMEOUT_S)
    assert not isinstance(caught.value, RunError)
    with pytest.raises(RunError, match=r"^out of it$"):
        Pending.of_calls(called(members, "refuse", True)).wait(TIMEOUT_S)


def test_a_bug_keeps_its_traceback(members: list[Any]) -> None:
    with pytest.raises(RayTaskError, match=r"in break_down[\s\S]*ValueError: a bug"):
        Pending.of_calls(called(members, "break_down")).wait(TIMEOUT_S)


def test_an_actor_that_is_silent_is_named(members: list[Any]) -> None:
    calls = [
        *called(members[:1], "give", 1),
        ActorCall(members[1].work.remote(), ActorLabel("rank 1 of pool test", "worker")),
    ]
    with pytest.raises(RunError, match=r"^no answer within 1 s from rank 1 of pool test$"):
        Pending.of_calls(calls).wait(1)


def test_a_long_wait_shows_how_many_are_ready(
    members: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls_module, "PROGRESS_S", 0.2)
    quick = Pending.of_calls(called(members[:1], "give", 1))
    assert quick.wait(TIMEOUT_S) == [1]
    label = ActorLabel("rank 1 of pool test", "worker")
    slow = Pending.of_calls([ActorCall(members[1].work.remote(), label)]).then(sum)
    with pytest.raises(RunError, match=r"^no answer within 1 s \(trainer.limit\) from rank 1 of pool test$"):
        wait_for_all([quick, slow], "models", "trainer.limit", 1)
    assert capsys.readouterr().out.startswith("waiting for the models: 1 of 2 ready, 0 s\n")
    wait_for_all([quick], "models", "trainer.limit", 1)
    assert capsys.readouterr().out == ""


def test_an_actor_that_died_is_named(members: list[Any]) -> None:
    pid = ray.get(members[1].pid.remote(), timeout=TIMEOUT_S)
    calls = called(members, "work")
    kill(pid)
    since = time.monotonic()
    with pytest.raises(RunError, match=r"^rank 1 of pool test died: killed \(signal 9\) by a user") as found:
        Pending.of_calls(calls).wait(TIMEOUT_S)
    assert found.value.exit_code == 137
    assert time.monotonic() - since < 300


@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        ("leave", "rank 0 died: it ended by itself with exit code 4; its log has the reason", 1),
        ("crash", "rank 0 (log in {}) died: crashed (signal 11, SIGSEGV); its log has the stack", 139),
    ],
)
def test_an_actor_that_ends_by_itself_is_not_called_killed(
    cluster: None, tmp_path: Path, how: str, said: str, code: int
) -> None:
    log = tmp_path / "node0-rank0.log"
    member = ray.remote(num_cpus=0)(Member).remote()
    ray.get(member.log_to.remote(log), timeout=TIMEOUT_S)
    actor = ActorLabel("rank 0", "worker", tmp_path / "node*-rank0.log" if how == "crash" else None)
    with pytest.raises(RunError) as found:
        Pending.of_calls([ActorCall(getattr(member, how).remote(), actor)]).wait(TIMEOUT_S)
    assert (str(found.value), found.value.exit_code) == (said.format(tmp_path), code)


def test_the_actor_that_died_is_named_though_another_fails_first(members: list[Any]) -> None:
    pid = ray.get(members[1].pid.remote(), timeout=TIMEOUT_S)
    calls = [
        ActorCall(members[0].work_with.remote(pid), ActorLabel("rank 0 of pool test", "worker")),
        ActorCall(members[1].work.remote(), ActorLabel("rank 1 of pool test", "worker")),
    ]
    kill(pid)
    with pytest.raises(RunError, match=r"^rank 1 of pool test died"):
        Pending.of_calls(calls).wait(TIMEOUT_S)


def test_a_death_is_found_among_those_that_do_not_answer(members: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = called(members, "work")
    monkeypatch.setattr(calls_module, "_DEATH_NOTICE_S", 0.2)
    assert not calls_module.has_died(waiting)
    assert not calls_module.has_died([])
    monkeypatch.setattr(calls_module, "_DEATH_NOTICE_S", TIMEOUT_S)
    ray.kill(members[1])
    assert calls_module.has_died(waiting)
    ray.kill(members[0])
