"""The interface of what responds to prompts, with one turn of the model or with several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.rollout.engine import Completion, Sampling

Samplings = Sequence[tuple[int, Sampling]]
"""Seed and sampling of each response to a prompt."""
TURN_S = 0.5
"""Longest time of a turn, between two looks at what else the caller waits for."""


class Responses(Protocol):
    """The responses to one prompt that were requested together."""

    @property
    def is_complete(self) -> bool:
        """Whether there are all responses."""

    def completions(self) -> list[Completion]:
        """Return the responses in the order in which they were requested."""


class Respondent(Protocol):
    """What responds to prompts: the RequestQueue with one turn, Conversations and Agents with several.

    Its calls may come from any thread, but only from one at a time.
    """

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0) -> Responses:
        """Request responses to one prompt. Prompts of a smaller wave go first."""

    def turn(self, timeout_s: float) -> None:
        """Let the engines generate until they have completed something, at most this long.

        Raises:
            UserError: an engine refused a request, or too many could not start in the place of another.
            RunError: too many engines have died, one takes too long to start, or what converses with the model cannot
                go on.
        """

    def pause(self) -> None:
        """Wait until no engine generates. What is not complete stays where it is."""

    def wait(self, asked: Sequence[Responses], stops: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all these responses of its own are complete, or until `stops`; return whether they are."""
        left = deque(asked)
        while left:
            while left and left[0].is_complete:
                left.popleft()
            if left and stops():
                return False
            if left:
                self.turn(TURN_S)
        return True
