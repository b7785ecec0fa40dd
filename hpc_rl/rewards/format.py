"""Scores 1 if a regular expression matches the whole response, else 0; the answer does not matter."""

from __future__ import annotations

import re


def score(response: str, answer: object, pattern: str) -> float:
    """Match the response; `.` also matches line breaks."""
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)
