"""Scores 1 if the final answer is mathematically equal to the reference answer, else 0, by the math-verify library.

The final answer is the last \\boxed{...}, or what math-verify finds if there is none. There is no time limit here;
RewardProcesses ends a process that takes too long.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]

from hpc_rl.rewards.number import required_text

_BOXED = "\\boxed"
_PERCENT = re.compile(r"\\?%")

# math-verify warns that its time limits are off. They are alarms, which cannot interrupt arithmetic on large numbers.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def score(response: str, answer: object) -> float:
    """Compare response and answer, which is LaTeX or a number, with or without $ or \\boxed around it.

    If only one of the two is a percentage, 50% equals both 50, as in common data sets, and 0.5.
    """
    text = required_text(answer)
    found = response[max(response.rfind(_BOXED), 0) :]
    parsed = parse(_PERCENT.sub("", found), parsing_timeout=None)
    references = [_reference(text)]
    percentages = [_PERCENT.search(one) is not None for one in (text, found)]
    if percentages in ([True, False], [False, True]):
        references.append(_reference(text, "{}/100" if percentages[0] else "100*({})"))
    return float(any(verify(expected, parsed, timeout_seconds=None) for expected in references))


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


def _bare(text: str) -> str:
    """Return an answer without the marks around it."""
    return extract(text) or text.replace("$", "")


@lru_cache(maxsize=4096)
def _reference(answer: str, form: str = "{}") -> list[Any]:
    """Return what a reference answer means, or a form of it."""
    text = _PERCENT.sub("", answer).replace("\\$", "").strip()
    has_marks = text.count("$") > 1 or _BOXED in text
    if form != "{}":
        text, has_marks = form.format(_bare(text)), False
    expected: list[Any] = parse(text if has_marks else f"{_BOXED}{{{text.replace('$', '')}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the reference answer {answer[:40]!r} is not readable as mathematics")
    return expected
