"""torchtitan saves after any step and ends as hpc-rl asks. It resumes by itself from its last complete checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.inside.training import Training
from hpc_rl.liveness.heartbeat import heart

_RENAMED = {"lr": "train/lr", "n_tokens_seen": "train/tokens"}
_training: list[Training] = []
"""The training of this process, from its first step."""
_measured: dict[str, float] = {}
"""What is measured in the step that has not ended."""


def attach(module: Any) -> None:
    """Add the adapter to torchtitan.components.checkpointer.base, or to what versions before 0.3 have, or to the
    metrics."""
    if (processor := getattr(module, "MetricsProcessor", None)) is not None:
        wrap(processor, "log", _log)
    else:
        manager = getattr(module, "BaseCheckpointManager", None) or module.CheckpointManager
        if manager.__module__ == module.__name__:
            wrap(manager, "save", _save)


def _save(original: Callable[..., Any], manager: Any, curr_step: int, last_step: bool = False) -> Any:
    if not _training:
        _training.append(Training())
    training = _training[0]
    is_due = training.ends_step(curr_step, curr_step if last_step else _total(manager))
    training.log(_measured)
    _measured.clear()
    if not is_due or not getattr(manager, "enable", True):
        result = original(manager, curr_step, last_step)
        training.begins_step()
        return result
    began, manager.interval = time.monotonic(), 1  # last_step=True would save the model only
    with heart.phase("save_checkpoint"):
        original(manager, curr_step, last_step)
        for name in ("maybe_wait_for_staging", "maybe_wait_for_saving", "_async_wait"):
            getattr(manager, name, lambda: None)()
    training.saved(curr_step, Path(manager.folder, f"step-{curr_step}"), time.monotonic() - began)
    return None


def _total(manager: Any) -> int | None:
    """Return the last step. torchtitan's trainer is among the states that it saves."""
    trainer = getattr(manager, "states", {}).get("train_state")
    config = getattr(trainer, "config", None) or getattr(trainer, "job_config", None)
    steps = getattr(getattr(config, "training", None), "steps", None)
    return int(steps) if steps else None


def _log(original: Callable[..., Any], processor: Any, step: int, loss: float, *arguments: Any, **named: Any) -> Any:
    more: Mapping[str, Any] = named.get("extra_metrics") or {}
    _measured.update({"train/loss": float(loss)})
    _measured.update({_RENAMED[name]: float(value) for name, value in more.items() if name in _RENAMED})
    return original(processor, step, loss, *arguments, **named)
