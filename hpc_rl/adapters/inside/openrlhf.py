"""OpenRLHF's trainers save at the end of a step when the run has to stop. They are then ended from outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hpc_rl.adapters.inside.agreement import RankGroup
from hpc_rl.adapters.inside.asked import SaveOnce
from hpc_rl.adapters.inside.hooks import wrap

_METHOD = "save_logs_and_checkpoints"
_once = SaveOnce()
_ranks: list[RankGroup] = []
"""Of this process, once it has saved or not saved for the first time."""


def attach(module: ModuleType) -> None:
    """Wrap the method that each trainer of a module calls once a step."""
    for _, trainer in inspect.getmembers(module, inspect.isclass):
        if _METHOD in vars(trainer):
            wrap(trainer, _METHOD, _save_logs_and_checkpoints)


def _save_logs_and_checkpoints(original: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    if not _ranks:
        _ranks.append(RankGroup())
    if not _ranks[0].of_main(_once.is_due() if _ranks[0].is_main else None):
        return original(trainer, *arguments, **named)
    own = named.get("args", arguments[0] if arguments and hasattr(arguments[0], "__dict__") else None)
    options = own if own is not None else trainer.args
    options = getattr(options, "ckpt", options)  # `ckpt.save_steps`; `save_steps` before 0.11
    before, options.save_steps = options.save_steps, 1
    try:
        return original(trainer, *arguments, **named)
    finally:
        options.save_steps = before
