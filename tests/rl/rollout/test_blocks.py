"""Blocks of an engine that has only `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpc_rl.rl.rollout.engine import BlockEngine, Completion, Sampling, SeparateBlocks, blocks_of
from hpc_rl.rl.rollout.hf import HfEngine
from hpc_rl.rl.rollout.vllm import VllmEngine


class Echo:
    """Answers with the prompt and the seed."""

    def generate(self, prompts: Sequence[Any], seeds: Sequence[int], _sampling: Sampling) -> list[Completion]:
        zeros = np.zeros(1, np.float32)
        return [Completion(np.append(p, s), zeros, True) for p, s in zip(prompts, seeds, strict=True)]


def test_blocks_return_in_their_order() -> None:
    blocks = blocks_of(Echo())  # type: ignore[arg-type]
    assert isinstance(blocks, SeparateBlocks)
    for number in (3, 1):
        blocks.add_block([np.array([number])] * 2, [number, 9], Sampling(4))
    found = [[c.token_ids.tolist() for c in blocks.next_block()] for _ in range(2)]
    assert found == [[[3, 3], [3, 9]], [[1, 1], [1, 9]]]


def test_which_engines_overlap_blocks() -> None:
    assert isinstance(VllmEngine.__new__(VllmEngine), BlockEngine)
    assert not isinstance(HfEngine.__new__(HfEngine), BlockEngine)
