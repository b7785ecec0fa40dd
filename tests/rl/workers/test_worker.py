from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from hpc_rl.config.rl.pools import Role
from hpc_rl.rl.actors import process
from hpc_rl.rl.carriers.base import DirectSink
from hpc_rl.rl.workers.worker import MODELS, Worker
from tests.rl.ppo_config import ppo_config


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(process, "begin", lambda log: None)
    return Worker(ppo_config(), "train", 1, 2, 2, frozenset({"actor", "ref"}), tmp_path)


def test_every_role_is_a_model_or_an_engine() -> None:
    assert {*MODELS, "rollout"} == set(get_args(Role))


def test_a_call_that_needs_a_missing_part_names_it(worker: Worker) -> None:
    message = "rank 1 of pool train has no {}: its roles are actor, ref, and it has nothing so far"
    calls = {
        "critic": lambda: worker.values(DirectSink()),
        "reward": lambda: worker.reward_scores(None),  # type: ignore[arg-type]
        "rollout": lambda: worker.advance([], 1.0, 0),
        "sender": worker.send_weights,
        "held": lambda: worker.held,
    }
    for part, call in calls.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == message.format(part)


def test_held_responses_are_a_part(worker: Worker) -> None:
    worker._parts["held"] = "responses"
    assert worker.held == "responses"
    with pytest.raises(RuntimeError, match="and it has held so far"):
        worker.flops()
