"""transformers' Trainer, and all that is built on it (TRL, Axolotl, LLaMA-Factory, ms-swift, Unsloth), saves, ends and
resumes as hpc-rl asks. Its files and the user's are not changed: the Trainer gets a further callback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_rl.adapters.inside.agreement import Ranks
from hpc_rl.adapters.inside.run import AdaptedRun
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from hpc_rl.liveness.heartbeat import heart

METRICS: Mapping[str, str] = {
    "loss": "train/loss",
    "learning_rate": "train/lr",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "eval_loss": "val/loss",
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "kl": "actor/kl",
    "completions/mean_length": "response_length/mean",
}
"""Trainer's name -> ours. Others keep theirs, after `train/` or `val/`."""
_TOKENS = "num_tokens"
"""TRL's count of the tokens of all steps."""
_NOT_OURS = ("total_flos", "train_runtime")
EVENTS = (*("on_step_begin", "on_substep_end", "on_prediction_step", "on_step_end", "on_log", "on_save"),)
"""Of a TrainerCallback; TrainerAdapter has a method for each."""
_own: dict[int, TrainerAdapter] = {}
"""Identity of Trainer's arguments, which every event brings -> the adapter of its training."""


def attach(module: ModuleType) -> None:
    """Add the adapter to transformers.trainer."""
    events = {name: _forwarded(name) for name in EVENTS}
    callback = type("StopCallback", (module.TrainerCallback,), events)  # type: ignore[attr-defined]
    trainer = module.Trainer  # type: ignore[attr-defined]
    trainer.train = _adapted_train(trainer.train, callback)
    trainer._save_checkpoint = _in_phase(trainer._save_checkpoint, "save_checkpoint")
    trainer.evaluate = _in_phase(trainer.evaluate, "validation")


def _forwarded(name: str) -> Callable[..., None]:
    def event(_callback: Any, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if (adapter := _own.get(id(args))) is not None:
            getattr(adapter, name)(*((logs,) if name == "on_log" else (state, control)))

    return event


class TrainerAdapter:
    """The adapter of one call of Trainer.train."""

    def __init__(self, trainer: Any) -> None:
        self._args = trainer.args
        self.ranks = Ranks()
        self._run = AdaptedRun() if self.ranks.is_main else None
        self.is_stopping = False
        self.seconds: dict[str, float] = {}
        """Of the latest phases, by name."""
        self._tokens: tuple[float, float] | None = None

    def newest(self, trainer: Any) -> str | None:
        """Return the checkpoint to resume from, the same on all ranks.

        Raises:
            SystemExit: it cannot be resumed with this number of processes.
        """
        found = self.ranks.of_main(self._run.newest(self._args.output_dir) if self._run else None)
        if found is None:
            return None
        if found.processes != self.ranks.count and trainer.is_deepspeed_enabled:
            print(
                f"{found.path} was written by {found.processes} processes, and DeepSpeed resumes it with as many only; "
                f"this job has {self.ranks.count}: submit it with the same number of nodes and GPUs",
                flush=True,
            )
            raise SystemExit(EXIT_BAD_INPUT)
        path: str = found.path
        return path

    def on_step_begin(self, _state: Any, _control: Any) -> None:
        if self._run:
            self._run.begin()

    def on_substep_end(self, _state: Any, _control: Any) -> None:
        heart.beat()

    on_prediction_step = on_substep_end

    def on_step_end(self, state: Any, control: Any) -> None:
        """Decide on all ranks alike whether this step is the last one of the attempt."""
        heart.at_step(state.global_step + 1)
        is_last = state.global_step >= state.max_steps
        if self._run:
            self._run.end_step(state.global_step, state.max_steps)
        is_due = not is_last and self._run is not None and self._run.is_due(control.should_evaluate)
        if self.ranks.of_main(is_due):
            self.is_stopping = control.should_save = control.should_training_stop = True
            control.should_evaluate = False
            self._args.save_only_model = False  # it could not be resumed

    def on_log(self, logs: Mapping[str, Any]) -> None:
        if self._run and not any(name in logs for name in _NOT_OURS):
            self._run.log({**renamed(logs), **self._speed(logs)})

    def on_save(self, state: Any, _control: Any) -> None:
        """Record the checkpoint when all ranks have written their part, and end the process if it was the last one.

        What follows in the training and in the script is for the end of a run: Trainer may load the best model and
        delete this checkpoint, and scripts export what looks like a finished model.

        Raises:
            SystemExit: the run stops.
        """
        self.ranks.wait()
        if self._run:
            path = Path(self._args.output_dir, f"checkpoint-{state.global_step}").absolute()
            saved = Checkpoint(state.global_step, str(path), self.ranks.count)
            self._run.note_saved(saved, self.seconds.get("save_checkpoint", 0.0))
        if self.is_stopping:
            if self._run:
                print(self._run.stopped(), flush=True)
            raise SystemExit(EXIT_STOPPED)

    def note(self, phase: str, seconds: float) -> None:
        """Note the time of a phase."""
        self.seconds[phase] = seconds
        if phase == "validation" and self._run:
            self._run.note_tested(seconds)

    def _speed(self, logs: Mapping[str, Any]) -> dict[str, float]:
        if _TOKENS not in logs:
            return {}
        now, before = (float(logs[_TOKENS]), time.monotonic()), self._tokens
        self._tokens = now
        return {"perf/tokens_per_s": (now[0] - before[0]) / (now[1] - before[1])} if before else {}


def renamed(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the measurements of Trainer's log under our names."""
    numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
    return {METRICS.get(name) or _grouped(name): value for name, value in numbers.items()}


def _grouped(name: str) -> str:
    return f"val/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def _adapted_train(original: Callable[..., Any], callback: type) -> Callable[..., Any]:
    @wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        self.remove_callback(callback)
        self.add_callback(callback)  # the last one: it decides after the user's own
        adapter = _own[id(self.args)] = TrainerAdapter(self)
        heart.begin(f"rank {adapter.ranks.rank}", waits=True)
        if (own := adapter.newest(self)) is not None:
            if adapter.ranks.is_main:
                print(f"resuming from {own}", flush=True)
            resume_from_checkpoint = own
        try:
            with heart.phase("training"):
                return original(self, resume_from_checkpoint, *arguments, **named)
        finally:
            del _own[id(self.args)]

    return train


def _in_phase(original: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        with _timed(self.args, phase):
            return original(self, *arguments, **named)

    return call


@contextmanager
def _timed(args: Any, phase: str) -> Iterator[None]:
    began = time.monotonic()
    with heart.phase(phase):
        yield
    if id(args) in _own:
        _own[id(args)].note(phase, time.monotonic() - began)
