"""The reward: how good a response is, as one number."""

import re


def score(response: str, answer: str) -> float:
    """Return 1 if the last number of the response is the right answer, else 0."""
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)
