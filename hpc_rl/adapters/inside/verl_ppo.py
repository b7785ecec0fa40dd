"""verl's main_ppo saves at the end of a step when the run has to stop. V1 then ends by itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hpc_rl.adapters.inside.asked import SaveOnce, is_asked
from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.verl import ENV_CALLBACK

LOOK_S = 1.0
_once = SaveOnce()


class StopCallback:
    """`trainer.checkpoint_callback_class` of V1, in the process of the trainer.

    Args:
        config: the trainer's own settings, which it reads again at each step.
    """

    def __init__(self, config: Any = None) -> None:
        self._config = config
        module, _, name = os.environ.get(ENV_CALLBACK, "").rpartition(".")
        self._own = getattr(import_module(module), name)(config=config) if module else None
        threading.Thread(target=self._watch, daemon=True).start()

    def on_save(self, trainer: Any, global_step: int, async_save: bool = False, **named: Any) -> None:
        """Make this step the last one if the run stops and the checkpoint is complete."""
        if self._own is not None:
            self._own.on_save(trainer=trainer, global_step=global_step, async_save=async_save, **named)
        if is_asked() and not async_save and global_step < trainer.total_training_steps:
            trainer.total_training_steps = global_step
            print(f"stopped after step {global_step}: checkpoint saved", flush=True)

    def _watch(self) -> None:
        while not is_asked():
            time.sleep(LOOK_S)
        self._config.trainer.save_freq = 1


def attach(module: Any) -> None:
    """Have V0's check of its time, in verl.utils.checkpoint.checkpoint_manager, look at the stop file too."""
    if hasattr(module, "should_save_ckpt_esi"):
        wrap(module, "should_save_ckpt_esi", _should_save)


def _should_save(original: Callable[..., bool], *arguments: Any, **named: Any) -> bool:
    return _once.is_due() or original(*arguments, **named)
