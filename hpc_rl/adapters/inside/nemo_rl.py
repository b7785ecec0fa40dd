"""NeMo-RL's own check of its time, once a step, looks at the stop file too, and counts from the start of the program.

NeMo-RL then saves and ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import wraps
from typing import Any

from hpc_rl.adapters.inside.asked import is_asked
from hpc_rl.adapters.step_line import step_line

_BEGAN = time.time()
"""When the program imported this: the limit that the adapter gives it counts from here, not from its first step."""


def attach(module: Any) -> None:
    """Change the timer in nemo_rl.utils.timer, or print the steps that nemo_rl.utils.logger logs."""
    if "TimeoutChecker" in vars(module):
        _change_timer(module.TimeoutChecker)
    else:
        _print_steps(module.Logger)


def _change_timer(checker: Any) -> None:
    init, check = checker.__init__, checker.check_save

    @wraps(init)
    def changed_init(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.start_time = _BEGAN

    @wraps(check)
    def check_save(self: Any) -> bool:
        if is_asked() and not self.last_saved:
            self.last_saved = True
            return True
        found: bool = check(self)
        return found

    checker.__init__, checker.check_save = changed_init, check_save


def _print_steps(logger: Any) -> None:
    original = logger.log_metrics

    @wraps(original)
    def log_metrics(
        self: Any, metrics: Mapping[str, Any], step: int, prefix: str = "", *rest: Any, **named: Any
    ) -> Any:
        if prefix in ("train", "timing/train", "validation"):
            print(step_line(step, None, {f"{prefix}/{name}": value for name, value in metrics.items()}), flush=True)
        return original(self, metrics, step, prefix, *rest, **named)

    logger.log_metrics = log_metrics
