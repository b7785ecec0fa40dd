"""Sessions without a server: who has them, and how they end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from hpc_rl.data.prompts import Prompt
from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.rl.endpoint import sessions as module
from hpc_rl.rl.endpoint.messages import Refusal, read_chat
from hpc_rl.rl.endpoint.rendering import Rendering
from hpc_rl.rl.endpoint.session import Session
from hpc_rl.rl.endpoint.sessions import Sessions
from hpc_rl.rl.rollout.engine import Completion, Sampling, Span
from tests.rl.ppo_config import ppo_config

ASK = {"role": "user", "content": "Sum?"}
TIMEOUT_S = 600.0


@pytest.fixture
def sessions(tokenizer: Any) -> Sessions:
    rendering = Rendering(tokenizer, ppo_config("agent.endpoint=loopback"))
    return Sessions(rendering, most_prompt=100, timeout_s=TIMEOUT_S, needs_reward=True)


def opened(sessions: Sessions, wave: int = 0) -> Session:
    prompt = Prompt(np.arange(5, dtype=np.int32), "3", {}, "")
    session = Session(prompt=prompt, wave=wave, seed=1, sampling=Sampling(50), sessions=sessions, messages=[ASK])
    sessions.open(session)
    return session


def taken(sessions: Sessions, key: str) -> Session:
    session = sessions.take(key)
    assert session is not None
    return session


def turn(sessions: Sessions, session: Session) -> None:
    """Let an engine generate the turn that was requested."""
    assert session.is_busy
    found = Completion(np.array([7, 0], np.int32), np.zeros(2, np.float32), True, (Span(0, 2),))
    session.transcript.add_turn(found)
    sessions.hear(session, found)


def has_ended(session: Session) -> bool:
    """Return whether a session has ended, and its turns are complete."""
    return session.outcome is not None and not session.is_busy


def test_sessions_are_taken_by_wave_and_then_in_order(sessions: Sessions) -> None:
    key = sessions.admit("an agent")
    found = [opened(sessions, wave) for wave in (1, 0, 1, 0)]
    assert [found.index(taken(sessions, key)) for _ in found] == [1, 3, 0, 2]
    assert sessions.take(key) is None


def test_a_session_may_be_put_back(sessions: Sessions) -> None:
    session = opened(sessions)
    key, later = (sessions.admit(f"agent {number}") for number in range(2))
    sessions.put_back(taken(sessions, key))
    assert taken(sessions, later) is session and session.owner == later
    other = opened(sessions)
    taken(sessions, key)
    sessions.dismiss(key, "agent 0 ended")
    sessions.put_back(other)
    assert sessions.take(later) is None and has_ended(other), "it has failed before"
    with pytest.raises(Refusal, match=r"the request has no valid key"):
        sessions.take(key)


def test_an_agent_that_ends_takes_only_its_own_sessions_along(sessions: Sessions) -> None:
    keys = [sessions.admit(f"agent {number}") for number in range(2)]
    assert [sessions.owner_of(f"Bearer {key}") for key in keys] == keys
    first, second = opened(sessions), opened(sessions)
    for key in keys:
        taken(sessions, key)
    reply = sessions.chat(keys[0], first.name, read_chat({"messages": [ASK]}))
    sessions.dismiss(keys[0], "agent 0 ended with exit code 1")
    with pytest.raises(Refusal, match=r"the request has no valid key"):
        sessions.owner_of(f"Bearer {keys[0]}")
    assert sessions.owner_of(f"Bearer {keys[1]}") == keys[1]
    with pytest.raises(Refusal, match=r"has ended: agent 0 ended with exit code 1; take another one"):
        reply.result(0)
    assert not has_ended(first), "its turn is not complete"
    turn(sessions, first)
    assert has_ended(first) and not has_ended(second)
    assert first.outcome == EpisodeResult(None, error="agent 0 ended with exit code 1") and second.outcome is None
    response = asyncio.run(first.end())
    assert response.token_ids.tolist() == [7, 0] and not response.finished


def test_sessions_that_wait_end_only_if_no_agent_does_anything(sessions: Sessions) -> None:
    key = sessions.admit("an agent")
    first, waiting = opened(sessions), opened(sessions)
    taken(sessions, key)
    now_s = time.monotonic()
    sessions.expire(now_s + TIMEOUT_S - 10)
    assert not has_ended(first) and not has_ended(waiting)
    sessions.expire(now_s + TIMEOUT_S + 10)
    assert has_ended(first) and not has_ended(waiting), "an agent was busy with the first one"
    sessions.expire(now_s + 2 * TIMEOUT_S - 10)
    assert not has_ended(waiting)
    sessions.expire(now_s + 2 * TIMEOUT_S + 30)
    assert has_ended(waiting) and sessions.take(key) is None
    assert first.outcome == EpisodeResult(None, error="the agent took more than 600 s (agent.timeout_s)")


def test_agents_that_only_come_and_go_do_nothing(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, now_s = opened(sessions), time.monotonic()
    for minute in range(11):
        key = sessions.admit("an agent")
        monkeypatch.setattr(module.time, "monotonic", lambda minute=minute: now_s + 60 * minute)
        assert not sessions.dismiss(key, "agent 0 ended with exit code 0")
    sessions.expire(now_s + TIMEOUT_S + 10)
    assert has_ended(waiting)
    key = sessions.admit("an agent")
    opened(sessions)
    taken(sessions, key)
    assert sessions.dismiss(key, "agent 0 ended with exit code 0") and not sessions.dismiss(key, "again")


def test_the_time_of_the_policy_is_not_the_agents(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    key, now_s = sessions.admit("an agent"), time.monotonic()

    def at(seconds: float) -> None:
        monkeypatch.setattr(module.time, "monotonic", lambda: now_s + seconds)
        sessions.expire(now_s + seconds)

    session = opened(sessions)
    at(0)
    taken(sessions, key)
    at(100)
    sessions.chat(key, session.name, read_chat({"messages": [ASK]}))
    at(5000)
    turn(sessions, session)
    at(5490)
    assert not has_ended(session)
    at(5510)
    assert has_ended(session)


def test_an_agent_may_give_up_while_the_policy_writes(sessions: Sessions) -> None:
    key = sessions.admit("an agent")
    session = opened(sessions)
    taken(sessions, key)
    reply = sessions.chat(key, session.name, read_chat({"messages": [ASK]}))
    with pytest.raises(Refusal, match="a turn of the session is being generated"):
        sessions.finish(key, session.name, EpisodeResult(1.0))
    sessions.finish(key, session.name, EpisodeResult(None, error="too slow"))
    with pytest.raises(Refusal, match="has ended: the agent has ended it"):
        reply.result(0)
    assert not has_ended(session)
    turn(sessions, session)
    assert has_ended(session) and session.outcome == EpisodeResult(None, error="too slow")


def test_a_session_counts_for_the_agents_only_with_its_reward(sessions: Sessions) -> None:
    key = sessions.admit("an agent")
    session, failed = opened(sessions), opened(sessions)
    for _ in range(2):
        taken(sessions, key)
    sessions.chat(key, session.name, read_chat({"messages": [ASK]}))
    turn(sessions, session)
    sessions.finish(key, session.name, EpisodeResult(1.0))
    assert sessions.rewarded == 1
    sessions.finish(key, failed.name, EpisodeResult(None, error="no disk"))
    assert sessions.rewarded == 1 and has_ended(session) and has_ended(failed)


def test_turns_are_as_long_as_the_agent_and_the_run_allow(sessions: Sessions) -> None:
    key = sessions.admit("an agent")
    session = opened(sessions)
    taken(sessions, key)
    assert session.draw() == (1, Sampling(50))
    sessions.chat(key, session.name, read_chat({"messages": [ASK], "max_tokens": 9}))
    assert session.draw() == (1, Sampling(9)) and session.transcript.ids().tolist() == [0, 1, 2, 3, 4]
    turn(sessions, session)
    longer = [ASK, session.earlier[-1], ASK]
    with pytest.raises(Refusal, match="leaves none for another turn"):
        sessions.chat(key, session.name, read_chat({"messages": [*longer[:-1], {**ASK, "content": "x" * 100}]}))
    assert session.is_full
    sessions.chat(key, session.name, read_chat({"messages": longer, "max_tokens": 1000}))
    assert not session.is_full, "a shorter message has room"
    assert session.draw()[1].max_new_tokens == 50 - len(session.transcript.ids()) + 5


def test_only_the_latest_ends_are_remembered(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    key = sessions.admit("an agent")
    monkeypatch.setattr(module, "_MOST_ENDED", 2)
    names = [opened(sessions).name for _ in range(3)]
    for name in names:
        taken(sessions, key)
        sessions.finish(key, name, EpisodeResult(None, error="no disk"))
    for name, status in zip(names, (404, 410, 410), strict=True):
        with pytest.raises(Refusal) as refusal:
            sessions.finish(key, name, EpisodeResult(1.0))
        assert refusal.value.status == status


def test_a_run_that_has_ended_has_no_sessions(sessions: Sessions) -> None:
    key = sessions.admit("an agent")
    session = opened(sessions)
    taken(sessions, key)
    opened(sessions)
    reply = sessions.chat(key, session.name, read_chat({"messages": [ASK]}))
    sessions.close()
    late = EpisodeResult(1.0)
    for refused in (reply.result, lambda: sessions.take(key), lambda: sessions.finish(key, session.name, late)):
        with pytest.raises(Refusal, match=r"the run stops") as refusal:
            refused()
        assert refusal.value.status == 503
