"""1 where the final answer is mathematically equal to the reference, by the math-verify library.

The final answer is the last \\boxed{...} where there is one, else what math-verify finds. Nothing here ends a
comparison that takes too long: the process that scores is ended from outside.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]

from hpc_rl.rewards.number import needed

_BOXED = "\\boxed"

# The library warns that its own time limits are off. They are alarms, which cannot end arithmetic on huge numbers.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def score(response: str, answer: object) -> float:
    """The answer is LaTeX or a number, with or without $ or \\boxed around it."""
    expected = _reference(needed(answer))
    start = response.rfind(_BOXED)
    found = parse(response[max(start, 0) :], parsing_timeout=None)
    return float(verify(expected, found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _reference(answer: str) -> list[Any]:
    has_marks = "$" in answer or _BOXED in answer
    expected: list[Any] = parse(answer if has_marks else f"{_BOXED}{{{answer}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the reference answer {answer[:40]!r} is not readable as mathematics")
    return expected
