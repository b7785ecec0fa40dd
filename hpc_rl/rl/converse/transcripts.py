"""A conversation as the tokens of one response: those that the model sampled, and observations between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hpc_rl.environments.protocol import EpisodeResult, Message
from hpc_rl.rl.rollout.engine import Completion, Span


@dataclass(frozen=True, kw_only=True)
class Conversed(Completion):
    """A conversation as one response. `finished`: whether it ended before a limit of its tokens or turns."""

    outcome: EpisodeResult
    """The environment's reward."""
    messages: list[Message]
    """The whole conversation, with the prompt."""
    turns: int
    """Turns of the model."""
    calls: int = 0
    """Tool calls that were made."""
    bad_calls: int = 0
    """Tool calls that could not be read or made, or that raised."""

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """The tokens of the model's last turn."""
        observed = np.flatnonzero(~self.mask) if self.mask is not None else np.empty(0, np.int64)
        return self.token_ids[observed[-1] + 1 if len(observed) else 0 :]


class Transcript:
    """The tokens of a conversation so far. It grows by exactly what the model sampled, and by observations.

    Args:
        prompt: token ids [P].
        most: limit of the tokens after the prompt.
    """

    def __init__(self, prompt: NDArray[np.int32], most: int) -> None:
        self.prompt = prompt
        self._parts: list[Completion] = []
        """Turns and observations."""
        self.turns = 0
        self.left = most
        """Tokens that may follow."""

    def add_turn(self, completion: Completion) -> None:
        """Add a turn of the model."""
        self._parts.append(completion)
        self.turns += 1
        self.left -= len(completion.token_ids)

    def add_observation(self, ids: Sequence[int]) -> bool:
        """Add the ids between the model's last turn and its next one, unless no token could follow.

        Returns:
            whether it was added.
        """
        if len(ids) >= self.left:
            return False
        tokens = np.array(ids, np.int32)
        # The model reads them with the weights that sample what follows; they count to the turn before.
        version = self._parts[-1].spans[-1].version if self._parts[-1].spans else 0
        nothing = np.zeros(len(tokens), np.bool_)
        spans = (Span(version, len(tokens)),)
        self._parts.append(Completion(tokens, np.zeros(len(tokens), np.float32), True, spans, nothing))
        self.left -= len(tokens)
        return True

    def ids(self) -> NDArray[np.int32]:
        """Return the whole conversation, [P + R]."""
        return np.concatenate([self.prompt, *(part.token_ids for part in self._parts)])

    def joined(
        self, finished: bool, outcome: EpisodeResult, messages: list[Message], calls: int, bad_calls: int
    ) -> Conversed:
        """Return the conversation as one response."""
        spans = [span for part in self._parts for span in part.spans]
        merged = [
            Span(version, sum(span.tokens for span in same))
            for version, same in groupby(spans, key=lambda span: span.version)
        ]
        sampled = [np.ones(len(part.token_ids), np.bool_) if part.mask is None else part.mask for part in self._parts]
        return Conversed(
            np.concatenate([part.token_ids for part in self._parts]),
            np.concatenate([part.logprobs for part in self._parts]),
            finished,
            tuple(merged),
            np.concatenate(sampled) if len(self._parts) > 1 else None,
            self.prompt,
            outcome=outcome,
            messages=messages,
            turns=self.turns,
            calls=calls,
            bad_calls=bad_calls,
        )
