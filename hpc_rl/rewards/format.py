"""1 where the whole response has a form, whatever it says: a regular expression that matches all of it."""

from __future__ import annotations

import re


def score(response: str, answer: object, pattern: str) -> float:
    """`.` matches line breaks too."""
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)
