"""SkyRL's trainers get one more callback: they save after a step when the run has to stop. RL then ends by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hpc_rl.adapters.inside.asked import SaveOnce, is_asked
from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.step_line import step_line

_once = SaveOnce()


def attach(module: Any) -> None:
    """Give the callback to each trainer of skyrl.train.trainer, or of skyrl.train.sft_trainer."""
    events = {"on_step_end": _on_step_end, "on_save": _on_save, "on_log": _on_log}
    callback = type("StopCallback", (module.TrainingCallback,), events)
    for name in ("RayPPOTrainer", "SFTTrainer"):
        if name in vars(module):
            wrap(getattr(module, name), "__init__", partial(_init, callback))


def _init(callback: type, original: Callable[..., None], trainer: Any, *arguments: Any, **named: Any) -> None:
    original(trainer, *arguments, **named)
    trainer.add_callback(callback())


def _on_step_end(_callback: Any, _trainer: Any, _step: Any, control: Any) -> None:
    control.should_save = control.should_save or _once.is_due()


def _on_save(_callback: Any, trainer: Any, step: Any, _control: Any) -> None:
    """Make this step the last one. The SFT trainer has no such setting, and is ended from outside."""
    settings: Any = getattr(trainer.cfg, "trainer", None)
    if is_asked() and step.global_step < step.total_steps and hasattr(settings, "max_training_steps"):
        settings.max_training_steps = step.global_step


def _on_log(_callback: Any, _trainer: Any, step: Any, _control: Any) -> None:
    """Print the measurements in one line; the trainer itself logs a table of several lines."""
    print(step_line(step.global_step, step.total_steps, step.logs or {}), flush=True)
