"""Runs with real vLLM on the CPU, whose engine has two workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from hpc_rl.rl.loop import trainer
from tests.helpers import make_tiny_model
from tests.rl.rollout.vllm.test_engine import needs_vllm
from tests.rl.runs.jobs import TIMEOUT_S, Runs, metrics

POOLS = ("trainer.n_gpus_per_node=3", "pools.spec={train: [1], engines: [2]}", "pools.roles.rollout=engines")


def kill_worker(actor: Any, rank: int) -> None:
    def kill(process: Any) -> None:
        os.kill(process._engine._llm.llm_engine.model_executor.workers[rank].proc.pid, signal.SIGKILL)

    ray.get(actor.__ray_call__.remote(kill), timeout=TIMEOUT_S)


@pytest.mark.long
@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("when", ["wake", "sync"])
def test_an_engine_that_has_lost_a_worker_is_replaced(
    run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=64, num_attention_heads=2, num_key_value_heads=2)
    options = [f"model.path={model}", "rollout.name=vllm", "rollout.tensor_parallel_size=2", "algorithm=grpo", *POOLS]
    with run.state(tmp_path / "run", *options) as state, pytest.MonkeyPatch.context() as patch:
        call, killed = getattr(state.rollout, when), []

        def after_death() -> None:
            if state.step == 1 and not killed:
                killed.append(state.rollout._engines.actors[0])  # type: ignore[attr-defined]
                kill_worker(killed[0], 1)
            call()

        patch.setattr(state.rollout, when, after_death)
        assert trainer.train(state) == 0
    assert killed and len(metrics(tmp_path / "run")) == 2
    log = tmp_path / "run" / "attempt-1" / "node0-engines-engine0-worker1.log"
    out = capsys.readouterr().out
    assert "its worker 1 of 2 died: killed (signal 9) by a user or a program, or for lack of memory" in out
    assert f"another engine starts in its place, and its requests are repeated\nthe end of {log}:\n    " in out
