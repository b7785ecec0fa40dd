"""The table of built-in reward functions.

To add one, write a module of this package with a function `score` (the package's docstring describes it) and add a row.
The table imports none of the modules, so that a login node can check reward.function without their packages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A reward function of this package."""

    module: str
    """Module with the function `score`."""
    in_driver: bool = False
    """Whether it runs in the driver instead of separate processes, because it takes microseconds and always ends."""
    has_answers: bool = False
    """Whether the module has a function `extract(response)`, which returns the answer as text, or None if there is
    none. Answers that are equal count as the same vote in maj@k."""


REWARDS: dict[str, BuiltIn] = {
    "exact": BuiltIn("hpc_rl.rewards.exact", in_driver=True, has_answers=True),
    "format": BuiltIn("hpc_rl.rewards.format"),
    "gsm8k": BuiltIn("hpc_rl.rewards.gsm8k", in_driver=True, has_answers=True),
    "math": BuiltIn("hpc_rl.rewards.math", has_answers=True),
}
"""reward.function -> built-in function."""
