"""Scores 1 if the response equals the reference answer, ignoring white space around both, else 0."""

from __future__ import annotations

from hpc_rl.rewards.number import required_text


def score(response: str, answer: object) -> float:
    """Compare response and answer."""
    return float(response.strip() == required_text(answer).strip())


def extract(response: str) -> str | None:
    """Return the answer: the whole response."""
    return response.strip() or None
