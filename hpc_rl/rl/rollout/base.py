"""What the training loop asks of an engine that generates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: the most probable token, always."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: NDArray[np.int32]
    """[R], at least 1; the end-of-sequence token included where the response ended by it."""
    logprobs: NDArray[np.float32]
    """[R], natural logarithm, under softmax(logits / temperature); with greedy decoding at temperature 1."""
    finished: bool
    """Ended by itself, rather than cut at max_new_tokens."""


class RolloutEngine(Protocol):
    """A model that generates. Between two calls of `load_weights` its weights do not change."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion for each prompt, in order.

        Args:
            prompts: token ids [P] of each; equal prompts that stand next to each other are computed once.
            seeds: one per prompt. A completion depends on its prompt, its seed and the weights alone, not on what is
                generated beside it (up to rounding).
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, by their Hugging Face names; the engine copies what it is given."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back, as far as the engine can, until `wake`."""
        ...

    def wake(self) -> None: ...
