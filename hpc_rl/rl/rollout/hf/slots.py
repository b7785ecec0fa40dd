"""What the sequences of a batch have drawn so far. A sequence keeps its slot, while its row in the batch may change.

Shape suffixes: N sequences, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.rl.rollout.hf.kv_cache import grown
from hpc_rl.rl.rollout.sampling import uniforms


class Slots:
    """Hold tokens, log-probabilities and uniform numbers of as many sequences as the batch has rows, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.uniforms = torch.zeros(0, 0, dtype=torch.float32, device=device)
        """[slots, steps], like the others."""
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros_like(self.uniforms)
        self._free: list[int] = []

    def grow(self, slots: int, steps: int) -> None:
        """Make room for more sequences and longer ones, and keep what is there."""
        self._free += range(self.tokens.shape[0], slots)
        self.uniforms, self.tokens, self.logprobs = (
            grown(tensor, (slots, steps)) for tensor in (self.uniforms, self.tokens, self.logprobs)
        )

    def take(self, seeds: Sequence[int], steps: int) -> list[int]:
        """Return a free slot for each sequence, with the uniform numbers of its seed for this many steps."""
        slots = [self._free.pop() for _ in seeds]
        drawn_NS = torch.from_numpy(uniforms(seeds, steps)).to(self.uniforms.device)
        self.uniforms[:, :steps].index_copy_(0, torch.tensor(slots, device=drawn_NS.device), drawn_NS)
        return slots

    def places(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> torch.Tensor:
        """Return where each sequence's token of a step is in the flattened tensors."""
        return torch.from_numpy(slots * self.tokens.shape[1] + steps).to(self.tokens.device)

    def read(self, slots: Sequence[int], steps: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the first tokens of some sequences and their log-probabilities, both [N, S]."""
        index = torch.tensor(slots, device=self.tokens.device)
        tokens_NS, logprobs_NS = (x[:, :steps].index_select(0, index).cpu() for x in (self.tokens, self.logprobs))
        return tokens_NS.to(torch.int32).numpy(), logprobs_NS.numpy()

    def free(self, slots: Sequence[int]) -> None:
        """Take back the slots of sequences that have ended."""
        self._free += slots
