"""When the loop asks whether to stop, and what follows. Parts of a step are stand-ins; tests/rl/runs has real ones."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hpc_rl.algorithms.kl import AdaptiveKl
from hpc_rl.data.order import Position
from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.carriers.through_ray import RayCarrier
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.loop.computed import ComputedColumns
from hpc_rl.rl.loop.draws import Batch, Greedy
from hpc_rl.rl.loop.scoring import NoBatchError, NoScoresError
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.workers.worker import Worker
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.timeline import Timeline
from hpc_rl.training.checkpoints.folders import Progress
from hpc_rl.training.perf import Clock, Spans
from hpc_rl.training.rows import FIXED
from hpc_rl.training.stopping import Stopping
from tests.rl.loop.test_experience import experience_of
from tests.rl.ppo_config import ppo_config

BEFORE, AFTER = Position(0, 4), Position(0, 8)


class Batches:
    """Moves on in the data with each batch."""

    position = BEFORE

    def draw(self, step: int, stops: Callable[[], bool]) -> Any:
        self.position = AFTER
        return SimpleNamespace(experience=lambda: "responses")


class Loop:
    """A run of four steps that validates after the second, and records what it does."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, job_end: float | None = None) -> None:
        patch.setattr("hpc_rl.training.stopping.SETTLE_S", 0.0)
        self.did: list[str] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.timelines: list[Timeline] = []
        self.stop_in: Callable[[int], bool] = lambda step: False
        run = RunDir(folder)
        self.state: Any = SimpleNamespace(
            config=ppo_config("trainer.test_freq=2", "trainer.save_minutes=0", "trainer.export=false"),
            run=run,
            stopping=Stopping(run, 180, lambda: job_end),
            batches=Batches(),
            carrier=RayCarrier(),
            rollout=SimpleNamespace(
                wake=lambda: None,
                sleep=lambda: None,
                queue=SimpleNamespace(busy_s=0.0, tokens=[], version=0, spans=Spans()),
            ),
            scoring=SimpleNamespace(take_spans=dict),
            groups=[],
            rows=FIXED,
            tracker=SimpleNamespace(
                log=self.log,
                log_timeline=self.timelines.append,
                name_left_out=lambda: None,
                finish=lambda _: None,
            ),
            saver=SimpleNamespace(
                save=lambda progress: self.did.append(f"save {progress.step}"),
                take_seconds=lambda: None,
                wait=lambda: None,
            ),
            progress=lambda *_: Progress(samples=4, dtype="float32", step=self.state.step),
            kl=AdaptiveKl(0.0, None, 1),
            **{"actor": SimpleNamespace(size=1), "critic": None, "train": ["prompt"] * 4, "val": ["prompt"]},
            **{"step": 0, "total_steps": 4, "saved_step": 0, "saved_at": 0.0},
            **{"validates_first": False, "stop": False, "save": False, "adapter_check": None},
        )
        self.whole_step = trainer.step
        patch.setattr(trainer, "step", self.step)
        patch.setattr(trainer, "test", lambda state: self.did.append(f"test {state.step}") or {"val/score": 1.0})

    def step(self, state: Any, clock: Clock) -> dict[str, float]:
        with clock("gen"):
            if self.stop_in(state.step + 1):
                state.run.stop.write_text("user\n")
        state.step += 1
        state.stopping.note_step(clock.seconds)
        return {"loss": 1.0}

    def log(self, step: int, metrics: dict[str, float], total_steps: int) -> None:
        self.did.append(f"log {step}")
        self.logged.append((step, metrics))

    def run(self) -> int:
        return trainer.train(self.state)


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(tmp_path, monkeypatch)


def test_a_whole_run(loop: Loop) -> None:
    assert loop.run() == 0
    assert loop.did == ["log 1", "log 2", "test 2", "log 2", "log 3", "log 4", "save 4", "test 4", "log 4"]
    assert [timeline.step for timeline in loop.timelines] == [1, 2, 3, 4]


def test_what_a_step_measured_is_recorded_before_it_is_saved(loop: Loop) -> None:
    loop.run()
    by_step = [[metrics for number, metrics in loop.logged if number == step] for step in (1, 2, 4)]
    assert [[sorted(metrics) for metrics in found] for found in by_step] == [
        [["loss", "timing_s/carry", "timing_s/gen", "timing_s/step"]],
        [["loss"], ["timing_s/carry", "timing_s/gen", "timing_s/step", "timing_s/testing", "val/score"]],
        [
            ["loss"],
            [*(f"timing_s/{name}" for name in ("carry", "gen", "save_checkpoint", "step", "testing")), "val/score"],
        ],
    ]


def test_a_stop_saves_and_leaves_out_the_validation(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.stop_in = lambda step: step == 2
    assert loop.run() == EXIT_STOPPED
    assert loop.did == ["log 1", "log 2", "save 2", "log 2"]
    assert "stopped after step 2 of 4: checkpoint saved" in capsys.readouterr().out


def test_a_validation_that_was_left_out_comes_first(loop: Loop) -> None:
    loop.state.step = loop.state.saved_step = 2
    loop.state.validates_first = True
    assert loop.run() == 0
    assert loop.did == ["test 2", "log 2", "log 3", "log 4", "save 4", "test 4", "log 4"]


def test_a_stop_before_the_first_step_saves_nothing(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.state.run.stop.write_text("user\n")
    assert loop.run() == EXIT_STOPPED
    assert loop.did == []
    assert "stopped after step 0 of 4: nothing is saved yet" in capsys.readouterr().out


def test_a_stop_in_the_last_step_changes_nothing(loop: Loop) -> None:
    loop.stop_in = lambda step: step == 4
    assert loop.run() == 0
    assert loop.did[-4:] == ["log 4", "save 4", "test 4", "log 4"]


def test_a_discarded_step_is_not_recorded_and_the_one_before_is_saved_once(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop.step
    monkeypatch.setattr(trainer, "step", lambda state, clock: made(state, clock) if state.step < 3 else {})
    assert loop.run() == EXIT_STOPPED
    assert loop.did == ["log 1", "log 2", "test 2", "log 2", "log 3", "save 3"]
    assert [timeline.step for timeline in loop.timelines] == [1, 2, 3]


def test_the_walltime_ends_too_soon_for_a_second_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch, job_end=time.time() + 170)
    assert loop.run() == EXIT_STOPPED
    assert loop.did == ["log 1", "save 1", "log 1"]
    assert loop.state.run.stop.read_text() == "walltime\n"


def test_a_walltime_that_is_too_short_for_a_step_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch, job_end=time.time() + 170)
    loop.state.run.stop.write_text("walltime\n")
    with pytest.raises(RunError, match="the walltime ends before the first step of this attempt is done"):
        loop.run()


@pytest.mark.parametrize("stopped_in, evaluated", [("draw", False), ("evaluate", True)])
def test_a_step_that_is_discarded_returns_to_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_in: str, evaluated: bool
) -> None:
    step, did = trainer.step, []
    state = Loop(tmp_path, monkeypatch).state

    def evaluate(*_: Any) -> None:
        did.append("evaluate")
        state.run.stop.write_text("user\n")

    draw = state.batches.draw
    if stopped_in == "draw":
        state.batches.draw = lambda *rest: state.run.stop.write_text("user\n") and draw(*rest)
    monkeypatch.setattr(trainer, "evaluate", evaluate)
    monkeypatch.setattr(trainer, "learn", lambda *_: pytest.fail("a discarded step changed the policy"))
    assert step(state, Clock()) == {}
    assert (state.batches.position, state.step) == (BEFORE, 0)
    assert did == (["evaluate"] if evaluated else [])


def evaluated(batch: Batch, *overrides: str) -> TensorDict:
    experience = experience_of([1] * len(batch.prompts))
    absent = dict.fromkeys(("critic", "old_logprobs"))
    nothing = ComputedColumns({}, 1, None)
    state = SimpleNamespace(config=ppo_config(*overrides), groups=[], step=0, computed=nothing, **absent)
    trainer.evaluate(state, batch, experience, Clock())  # type: ignore[arg-type]
    return experience


def batch_of(scores: list[float], errors: list[int], greedy: list[float] | None = None) -> Batch:
    """Two responses to each prompt."""
    found = lambda values, bad: Pending.known(  # noqa: E731
        Scores(np.array(values, np.float32), [(index, "reward broken") for index in bad])
    )
    of_greedy = None
    if greedy is not None:
        completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), True)
        bad = [index for index, score in enumerate(greedy) if np.isnan(score)]
        of_greedy = Greedy([completion] * len(greedy), found(greedy, bad))
    groups = [index // 2 for index in range(len(scores))]
    return Batch([None] * len(scores), groups, [], found(scores, errors), of_greedy)  # type: ignore[list-item]


def test_responses_without_a_baseline_do_not_count() -> None:
    nan, remax = np.nan, "algorithm.advantage=remax"
    found = evaluated(batch_of([1, nan, 0, 1], [1], greedy=[0, nan]), remax)
    assert found["scored"].tolist() == [True, False, False, False]
    with pytest.raises(NoScoresError, match=r"none of 4 responses has a score and a scored greedy .* reward broken"):
        evaluated(batch_of([nan, nan, 0, 1], [0, 1], greedy=[0, nan]), remax)


def test_errors_of_draws_that_were_replaced_are_not_those_of_the_step() -> None:
    batch = batch_of([0, 1, 0, 1], errors=[3, 4, 5, 6])  # as many errors as responses that were kept
    assert evaluated(batch, "algorithm.filter_groups=true")["scored"].all()
    with pytest.raises(NoScoresError, match="none of 4 responses could be scored"):
        evaluated(batch)


def test_a_step_stops_while_dynamic_sampling_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = trainer.step, Loop(tmp_path, monkeypatch).state
    state.batches.draw = lambda number, stops: None
    assert step(state, Clock()) == {}


@pytest.mark.parametrize(
    "error, repair", [(NoBatchError("only 0"), ""), (NoScoresError("none"), "repair the reward and ")]
)
@pytest.mark.parametrize("trained", [0, 3])
def test_a_step_without_a_batch_saves_those_before_it(loop: Loop, error: RunError, repair: str, trained: int) -> None:
    def draw(*_: Any) -> None:
        raise error

    loop.state.batches.draw = draw
    loop.state.step, loop.state.saved_step = trained, 0
    saved = f"; saved after step 3: {repair}start the run again to resume" if trained else ""
    with pytest.raises(RunError, match=f"^{error}{saved}$"):
        loop.whole_step(loop.state, Clock())
    assert loop.did == (["save 3"] if trained else [])


def test_a_worker_traces_what_lies_between_two_calls(tmp_path: Path) -> None:
    worker = Worker.__new__(Worker)
    worker.pool, worker.rank, worker._parts = "train", 1, {}
    worker.begin_trace()
    torch.ones(3, 3) @ torch.ones(3, 3)
    worker.end_trace(RunDir(tmp_path), 7)
    trace = tmp_path / "profiles" / "step-00000007" / "train-rank1.json.gz"
    assert "aten::mm" in {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert worker._parts == {}


def test_the_chosen_steps_are_traced_on_all_groups(tmp_path: Path) -> None:
    did: list[Any] = []
    pending = SimpleNamespace(wait=lambda: None)
    group = SimpleNamespace(
        begin_trace=lambda: did.append("begin") or pending, end_trace=lambda run, step: did.append(step) or pending
    )
    state: Any = SimpleNamespace(
        config=ppo_config("trainer.profile_steps=[2]"), step=0, groups=[group, group], run=None
    )
    for state.step in (0, 1, 2):
        with trainer.traced(state):
            did.append("step")
    assert did == ["step", "begin", "begin", "step", 2, 2, "step"]
