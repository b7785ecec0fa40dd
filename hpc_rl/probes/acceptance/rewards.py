"""The reward of the acceptance run."""

from __future__ import annotations


def characters(response: str, answer: object, **_: object) -> float:
    """Return a number from 0 to 1 that depends on the characters of a response."""
    return sum(map(ord, response)) % 11 / 10
