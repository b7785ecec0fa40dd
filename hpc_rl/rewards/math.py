"""Scores 1 if the final answer is mathematically equal to the reference answer, else 0, by the math-verify library.

The final answer is the last \\boxed{...}, or what math-verify finds if there is none. There is no time limit here;
RewardProcesses ends a process that takes too long. A comparison that needs too much memory raises MemoryError.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]

from hpc_rl.rewards.number import required_text
from hpc_rl.software.bounds import more_memory

_BOXED = "\\boxed"
_PERCENT = re.compile(r"(?<=[0-9])\{\\?%\}|(?:~|\\ )?\\?%")
"""A percent sign, with what math-verify cannot read after a number."""
_OF_PERCENT = re.compile(r"[0-9](?=\.?(?:[\s${})*~]|\\[,:;! ]|\\text\{)*+\\?%)")
"""The last digit before a percent sign."""
MEMORY_BYTES = 1 << 30
"""What a comparison may need; usual ones need less than a hundredth."""

# math-verify warns that its time limits are off. They are alarms, which cannot interrupt arithmetic on large numbers.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def score(response: str, answer: object) -> float:
    """Compare response and answer, which is LaTeX or a number, with or without $ or \\boxed around it.

    If only one of the two is a percentage, 50% equals both 50, as in common data sets, and 0.5. Other percent signs
    have no effect.
    """
    text = required_text(answer)
    found = response[max(response.rfind(_BOXED), 0) :]
    with more_memory(MEMORY_BYTES):  # a response of a few characters can be a number with billions of digits
        return _compare(text, found)


def _compare(text: str, found: str) -> float:
    expected, given = _reference(text), _parsed(found)
    pairs = [(expected, given)]
    percentages = (_is_percentage(text, _reference), _is_percentage(found, _parsed))
    if percentages == (True, False):
        pairs.append((_hundredth(expected), given))
    elif percentages == (False, True):
        pairs.append((expected, _hundredth(given)))
    return float(any(verify(one, other, timeout_seconds=None) for one, other in pairs))


def _parsed(text: str) -> list[Any]:
    """Return what math-verify reads in a text: the answer as an expression and as text."""
    parsed: list[Any] = parse(_PERCENT.sub("", text), parsing_timeout=None)
    return parsed


def _hundredth(parsed: list[Any]) -> list[Any]:
    """Return a hundredth of an answer, without a name before it and marks of Markdown around it."""
    answer = str(parsed[-1]).rpartition("=")[2].strip("* ") if parsed else ""
    return _parsed(f"{_BOXED}{{({answer})/100}}") if answer else []


def _is_percentage(text: str, read: Callable[[str], list[Any]]) -> bool:
    """Return whether the answer is before a percent sign: if it is, another number there is read as another answer."""
    other = _OF_PERCENT.sub(lambda digit: "3" if digit[0] == "7" else "7", text)
    return other != text and read(other) != read(text)


def extract(response: str) -> str | None:
    """Return the answer: the text in the last \\boxed{...}. Without it there is none, because what math-verify finds in
    a text cannot be compared quickly."""
    start = response.rfind(_BOXED + "{")
    depth = 0
    for end in range(max(start, 0), len(response)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(response[end], 0)
        if depth == 0 and response[end] == "}":
            return "".join(response[start + len(_BOXED) + 1 : end].split()) or None
    return None


@lru_cache(maxsize=4096)
def _reference(answer: str) -> list[Any]:
    """Return what a reference answer means."""
    text = _PERCENT.sub("", answer).replace("\\$", "").strip()
    has_marks = text.count("$") > 1 or _BOXED in text
    expected = _parsed(text if has_marks else f"{_BOXED}{{{text.replace('$', '')}}}")
    if not expected:
        raise ValueError(f"the reference answer {answer[:40]!r} is not readable as mathematics")
    return expected
