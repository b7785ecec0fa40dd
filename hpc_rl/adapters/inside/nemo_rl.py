"""NeMo-RL's own check of its time, once a step, looks at the stop file too, and counts from the start of the program.

NeMo-RL then saves and ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hpc_rl.adapters.inside.asked import is_asked
from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.step_line import step_line

_BEGAN = time.time()
"""When the program imported this: the limit that the adapter gives it counts from here, not from its first step."""


def attach(module: Any) -> None:
    """Change the timer in nemo_rl.utils.timer, or print the steps that nemo_rl.utils.logger logs."""
    if "TimeoutChecker" in vars(module):
        wrap(module.TimeoutChecker, "__init__", _init)
        wrap(module.TimeoutChecker, "check_save", _check_save)
    else:
        wrap(module.Logger, "log_metrics", _log_metrics)


def _init(original: Callable[..., None], checker: Any, *arguments: Any, **named: Any) -> None:
    original(checker, *arguments, **named)
    checker.start_time = _BEGAN


def _check_save(original: Callable[..., bool], checker: Any) -> bool:
    if is_asked() and not checker.last_saved:
        checker.last_saved = True
        return True
    return original(checker)


def _log_metrics(
    original: Callable[..., Any],
    logger: Any,
    metrics: Mapping[str, Any],
    step: int,
    prefix: str = "",
    *rest: Any,
    **named: Any,
) -> Any:
    if prefix in ("train", "timing/train", "validation"):
        print(step_line(step, None, {f"{prefix}/{name}": value for name, value in metrics.items()}), flush=True)
    return original(logger, metrics, step, prefix, *rest, **named)
