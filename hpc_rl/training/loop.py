"""The loop of every trainer: step -> save -> validate, and what is due after a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.data.order import Position
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.checkpoints.export import export_dtype
from hpc_rl.training.checkpoints.folders import Progress
from hpc_rl.training.checkpoints.saver import Saver
from hpc_rl.training.perf import Clock
from hpc_rl.training.rows import FIXED, Decision
from hpc_rl.training.stopping import TESTING, WRITING, Stopping


@dataclass(kw_only=True)
class LoopState:
    """What the loop needs of a run in progress. Each trainer has further fields. Fields that change come last."""

    config: FinetuneConfig | PpoConfig
    run: RunDir
    val: Sequence[Any]
    total_steps: int
    tracker: Tracker
    saver: Saver
    stopping: Stopping
    validates_first: bool = False
    """Whether a validation is due before the first step."""

    step: int
    """Number of steps that are done."""
    total_tokens: int
    rows: Decision = FIXED
    """What trainer.micro_tokens is."""
    saved_step: int = 0
    """Step of the newest checkpoint, or 0."""
    saved_at: float = field(default_factory=time.monotonic)
    stop: bool = False
    """Whether the run stops now. The checkpoint is then of `step`."""
    save: bool = False
    """Whether a checkpoint is due after this step."""

    def progress(self, position: Position, samples: int, ranks: int) -> Progress:
        """Return what a checkpoint records.

        Args:
            position: of the next step in the data.
            samples: in the training data.
            ranks: of the first model.
        """
        lora = self.config.model.lora
        return Progress(
            samples=samples,
            dtype=export_dtype(self.config.model, self.config.trainer),
            step=self.step,
            epoch=position.epoch,
            index=position.index,
            total_tokens=self.total_tokens,
            world_size=ranks,
            wandb_id=self.tracker.wandb_id,
            merge=lora.merge,
            quantize=lora.quantize,
            micro_tokens=self.rows.recorded,
        )


def validate_first(state: LoopState, validate: Callable[[], dict[str, float]]) -> None:
    """Validate before the first step, if it is due."""
    if state.validates_first:
        clock = Clock()
        with clock("testing"):
            metrics = validate()
        state.tracker.log(state.step, {**metrics, **clock.seconds}, state.total_steps)


def run_steps(
    state: LoopState,
    step: Callable[[Clock], dict[str, float]],
    save: Callable[[], None],
    validate: Callable[[], dict[str, float]],
    recorded: Callable[[Clock], None] = lambda clock: None,
) -> None:
    """Train from the state's step on, to the end or until the run stops.

    Args:
        step: makes a step, with the phases of the clock. It counts it in `state.step`, decides on `state.stop` and
            `state.save` (see `decide`), and returns metrics; none if the run stops and the step was discarded.
        save: writes a checkpoint, unless there is one of the step.
        validate: returns the metrics of the validation data; it sets `state.stop` if the run stops meanwhile.
        recorded: is called when all of a completed step is recorded.
    """
    while state.step < state.total_steps and not state.stop:
        clock = Clock()
        with clock("step"):
            metrics = step(clock)
            is_completed, is_last = bool(metrics), state.step == state.total_steps
            saves = is_last or state.stop or state.save
            validates = not state.stop and _validates(state, state.step)
            if is_completed and (saves or validates):  # now: an attempt after this one resumes after the step
                state.tracker.log(state.step, metrics, state.total_steps)
                metrics = {}
            if saves:
                with clock("save_checkpoint"):
                    save()
            if validates:
                with clock("testing"):
                    metrics |= validate()
                if state.stop:
                    with clock("save_checkpoint"):
                        save()
        if (seconds := state.saver.take_seconds()) is not None:
            clock.seconds[WRITING] = seconds
        state.stopping.note_save(clock.seconds)
        state.stopping.note_test(clock.seconds.get(TESTING))
        if is_completed:
            state.tracker.log(state.step, {**metrics, **clock.seconds}, state.total_steps)
            recorded(clock)


def decide(state: LoopState, step: int, step_s: float = 0.0) -> tuple[bool, bool]:
    """Return whether the run stops after a step, and whether it saves then. Clocks differ, so one process decides.

    Args:
        step: its number. It need not be counted yet.
        step_s: its seconds, if `state.stopping` has not noted them.
    """
    trainer, stopping = state.config.trainer, state.stopping
    work_s = max(stopping.rest_s(), step_s) + (stopping.testing_s if _validates(state, step) else 0.0)
    stops = step < state.total_steps and stopping.due(work_s)
    is_late = trainer.save_minutes > 0 and time.monotonic() - state.saved_at >= 60 * trainer.save_minutes
    return stops, is_late or _is_multiple(step, trainer.save_freq)


def validation_is_due(trainer: TrainingConfig, step: int, total_steps: int) -> bool:
    """Return whether a run with validation data validates after this step."""
    return step == total_steps or _is_multiple(step, trainer.test_freq)


def _validates(state: LoopState, step: int) -> bool:
    return bool(state.val) and validation_is_due(state.config.trainer, step, state.total_steps)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
