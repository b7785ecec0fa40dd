"""Scores 1 if the response equals the reference answer, ignoring white space around both, else 0.

If the answer is a number, true or false, or a list, the response is read as one: 5 equals 5.0, and True equals true.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal

from hpc_rl.rewards.number import required_text, single

_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")


def score(response: str, answer: object) -> float:
    """Compare response and answer.

    Raises:
        ValueError: there is no answer, or it has several items and the response is no JSON.
    """
    given, expected = response.strip(), single(answer)
    if isinstance(expected, bool):
        return float(given.lower() == str(expected).lower())
    if isinstance(expected, int | float | Decimal):
        return float(_NUMBER.fullmatch(given) is not None and Decimal(given) == Decimal(str(expected)))
    if isinstance(expected, list | tuple | dict):
        return float(_read(given, expected) == (list(expected) if isinstance(expected, tuple) else expected))
    return float(given == required_text(expected).strip())


def extract(response: str) -> str | None:
    """Return the answer: the whole response."""
    return response.strip() or None


def _read(given: str, expected: object) -> object:
    """Return the response as JSON."""
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the reference answer {str(expected)[:40]!r} has several parts, and the response is no JSON: use a reward "
            "function that states which of them are needed"
        ) from error
