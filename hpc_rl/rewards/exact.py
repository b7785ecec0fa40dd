"""1 where the response is the answer, apart from white space around both."""

from __future__ import annotations

from hpc_rl.rewards.number import needed


def score(response: str, answer: object) -> float:
    return float(response.strip() == needed(answer).strip())
