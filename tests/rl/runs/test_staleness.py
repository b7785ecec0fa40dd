"""Runs whose responses are generated while other ones are trained, with engines in a pool of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.loop.async_batches import AsynchronousBatches
from tests.marks import long
from tests.rl.runs.jobs import TIMEOUT_S, Runs, metrics, samples, series, stop_after

STALE = (
    *("pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", "trainer.n_gpus_per_node=2"),
    *("trainer.total_training_steps=5", "trainer.test_freq=2", "trainer.val_before_train=true"),
    *("data.max_response_length=24", "data.train_batch_size=3", "actor.mini_batch_size=12", "rollout.max_num_seqs=6"),
)


@pytest.mark.parametrize(
    "options",
    [
        ("rollout.staleness=1",),
        long(("rollout.staleness=1", "rollout.partial=true")),
        ("rollout.staleness=3", "rollout.partial=true", "algorithm.tis_cap=2"),
        long(
            ("rollout.staleness=3", "algorithm.tis_cap=2", "algorithm.filter_groups=true", "algorithm.advantage=grpo")
        ),
    ],
)
def test_no_response_is_older_than_allowed(run: Runs, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run(tmp_path, *STALE, *options) == 0
    found = metrics(tmp_path)
    steps = [record for record in found if "rollout/staleness/max" in record]
    limit = int(options[0][-1])
    oldest = [record["rollout/staleness/max"] for record in steps]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    assert oldest[0] == 0 and 0 < max(oldest) <= limit
    assert all(0 <= record["rollout/staleness/mean"] <= record["rollout/staleness/max"] for record in steps)
    assert all(record["rollout/versions/mean"] >= 1 for record in steps)
    if "rollout.partial=true" not in options:
        assert {record["rollout/versions/mean"] for record in steps} == {1}
    assert series(tmp_path, "val/score") and series(tmp_path, "perf/engine_idle_s")


def test_a_run_that_stops_and_resumes_trains_on_each_prompt_once(run: Runs, tmp_path: Path) -> None:
    stale = ("rollout.staleness=2", "algorithm.tis_cap=2", "trainer.test_freq=0", "trainer.val_before_train=false")
    (straight := tmp_path / "straight").mkdir()
    assert run(straight, *STALE, *stale) == 0
    (stopped := tmp_path / "stopped").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert run(stopped, *STALE, *stale) == EXIT_STOPPED
    (stopped / "stop").unlink()
    assert run(stopped, *STALE, *stale) == 0
    prompts = [(row["step"], row["prompt"]) for row in samples(straight)]
    assert [(row["step"], row["prompt"]) for row in samples(stopped)] == prompts and len(prompts) > 5
    assert max(series(stopped, "rollout/staleness/max")) <= 2


@pytest.mark.parametrize(("when", "engines"), [("wake", 1), long("wake", 2), long("sync", 1), ("sync", 2)])
def test_an_engine_that_is_killed_is_replaced(
    run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str, engines: int
) -> None:
    """During generation or before a weight sync. If it is the only one, the loop gives its successor the weights."""
    pools = (f"pools.spec={{train: [1], rollout: [{engines}]}}", f"trainer.n_gpus_per_node={1 + engines}")
    stale = [option for option in STALE if not option.startswith(("pools.spec", "trainer.n_gpus_per_node"))]
    with run.state(tmp_path, *stale, *pools, "rollout.staleness=1") as state, pytest.MonkeyPatch.context() as patch:
        call, killed = getattr(state.rollout, when), []

        def after_death() -> None:
            if state.step == 2 and not killed:
                actor = state.rollout._engines.actors[-1]  # type: ignore[attr-defined]
                killed.append(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S))
                os.kill(killed[0], signal.SIGKILL)
            call()

        patch.setattr(state.rollout, when, after_death)
        assert isinstance(state.batches, AsynchronousBatches)
        assert trainer.train(state) == 0
    assert "another engine starts in its place" in capsys.readouterr().out
    assert len(series(tmp_path, "rollout/staleness/max")) == 5
