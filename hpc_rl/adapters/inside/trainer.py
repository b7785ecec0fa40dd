"""transformers' Trainer, and all that is built on it (TRL, Axolotl, LLaMA-Factory, ms-swift, Unsloth), saves, ends and
resumes as hpc-rl asks. Its files and the user's are not changed: the Trainer gets a further callback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from hpc_rl.adapters.inside import beats
from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.inside.training import Training
from hpc_rl.errors import EXIT_BAD_INPUT
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
EVENTS = ("on_step_begin", "on_substep_end", "on_prediction_step", "on_step_end", "on_log", "on_save")
"""Of a TrainerCallback; TrainerAdapter has a method for each."""
_trains = count()
"""Number the trainings of this process, which may share a folder: their order is the same in each attempt."""
_own: dict[int, TrainerAdapter] = {}
"""Identity of Trainer's arguments, which every event brings -> the adapter of its training."""


def attach(module: Any) -> None:
    """Add the adapter to transformers.trainer."""
    events = {name: _forwarded(name) for name in EVENTS}
    callback = type("StopCallback", (module.TrainerCallback,), events)
    wrap(module.Trainer, "train", partial(_train, callback))
    wrap(module.Trainer, "_save_checkpoint", partial(_in_phase, "save_checkpoint"))
    wrap(module.Trainer, "evaluate", partial(_in_phase, "validation"))
    if version("transformers").startswith("4."):
        wrap(module, "skip_first_batches", _skip_first_batches)


def _forwarded(name: str) -> Callable[..., None]:
    def event(_callback: Any, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if (adapter := _own.get(id(args))) is not None:
            getattr(adapter, name)(*((logs,) if name == "on_log" else (state, control)))

    return event


class TrainerAdapter:
    """The adapter of one call of Trainer.train."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._args = trainer.args
        self._training = Training(f"train-{next(_trains)}")
        self._boundary = _cycle(trainer)
        self.seconds: dict[str, float] = {}
        """Of the latest phases, by name."""
        self._tokens: tuple[float, float] | None = None

    def newest(self) -> str | None:
        """Return the checkpoint to resume from, the same on all ranks.

        Raises:
            SystemExit: it cannot be resumed with this number of processes.
        """
        found, ranks = self._training.newest(self._args.output_dir), self._training.ranks
        if found is not None and found.processes != ranks.count and self._trainer.is_deepspeed_enabled:
            print(
                f"{found.path} was written by {found.processes} processes, and DeepSpeed resumes it on as many; this "
                f"job has {ranks.count}: submit it with the same number of nodes and GPUs",
                flush=True,
            )
            raise SystemExit(EXIT_BAD_INPUT)
        return found.path if found else None

    def on_step_begin(self, _state: Any, _control: Any) -> None:
        self._training.begins_step()

    def on_substep_end(self, _state: Any, _control: Any) -> None:
        heart.beat()

    on_prediction_step = on_substep_end

    def on_step_end(self, state: Any, control: Any) -> None:
        """Decide on all ranks alike whether this step is the last one of the attempt."""
        if self._training.ends_step(state.global_step, state.max_steps, control.should_evaluate, self._boundary):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
            self._args.save_only_model = False  # it could not be resumed

    def on_log(self, logs: Mapping[str, Any]) -> None:
        if not any(name in logs for name in _NOT_OURS):
            self._training.log({**renamed(logs), **self._speed(logs)})

    def on_save(self, state: Any, _control: Any) -> None:
        path = Path(self._args.output_dir, f"checkpoint-{state.global_step}")
        self._training.saved(state.global_step, path, self.seconds.get("save_checkpoint", 0.0))

    @property
    def epoch(self) -> int:
        """The epoch in which the training is."""
        return int(self._trainer.state.epoch or 0)

    def note(self, phase: str, seconds: float) -> None:
        """Note the time of a phase."""
        self.seconds[phase] = seconds
        if phase == "validation":
            self._training.tested(seconds)

    def _speed(self, logs: Mapping[str, Any]) -> dict[str, float]:
        if _TOKENS not in logs:
            return {}
        now, before = (float(logs[_TOKENS]), time.monotonic()), self._tokens
        self._tokens = now
        return {"perf/tokens_per_s": (now[0] - before[0]) / (now[1] - before[1])} if before else {}


def _cycle(trainer: Any) -> int:
    """Return the number of steps that share generations in TRL's GRPO and RLOO: they are not in a checkpoint."""
    micro_steps = getattr(trainer.args, "steps_per_generation", None) or 1
    micro_steps *= getattr(trainer, "num_iterations", None) or 1
    return int(math.lcm(micro_steps, accumulated := trainer.args.gradient_accumulation_steps) // accumulated)


def renamed(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the measurements of Trainer's log under our names."""
    numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
    return {METRICS.get(name) or _grouped(name): value for name, value in numbers.items()}


def _grouped(name: str) -> str:
    return f"val/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def _train(
    callback: type,
    original: Callable[..., Any],
    trainer: Any,
    resume_from_checkpoint: Any = None,
    *arguments: Any,
    **named: Any,
) -> Any:
    trainer.remove_callback(callback)
    trainer.add_callback(callback)  # the last one: it decides after the user's own
    adapter = _own[id(trainer.args)] = TrainerAdapter(trainer)
    try:
        return original(trainer, adapter.newest() or resume_from_checkpoint, *arguments, **named)
    finally:
        beats.end()
        del _own[id(trainer.args)]


def _skip_first_batches(original: Callable[..., Any], loader: Any, *arguments: Any, **named: Any) -> Any:
    """Shuffle the batches of a resumed epoch as this epoch's: before version 5, they are those of the first one."""
    rest = original(loader, *arguments, **named)
    if len(_own) == 1 and hasattr(rest, "set_epoch"):
        rest.set_epoch(next(iter(_own.values())).epoch)
    return rest


def _in_phase(phase: str, original: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    if (adapter := _own.get(id(trainer.args))) is None:
        return original(trainer, *arguments, **named)
    began = time.monotonic()
    with heart.phase(phase):
        result = original(trainer, *arguments, **named)
    adapter.note(phase, time.monotonic() - began)
    return result
