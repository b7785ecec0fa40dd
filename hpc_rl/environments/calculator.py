"""An example of an environment: sums that the model may let a tool compute.

The rows are those of `hpc-rl data arithmetic`.
"""

from __future__ import annotations

from typing import Any


class Calculator:
    """One question. The reward is 1 if the model's last turn is the answer, and 0 otherwise."""

    def reset(self, answer: str, **_: Any) -> None:
        """Begin with the question of a row."""
        self._answer = answer
        self._said = ""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def step(self, text: str) -> None:
        """Take a turn without tool calls as the model's answer, which ends the conversation."""
        self._said = text

    def reward(self) -> float:
        """Compare the answer."""
        return float(self._said.strip() == self._answer)
