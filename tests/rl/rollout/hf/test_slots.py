from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_rl.rl.rollout.hf.batch import Slots
from hpc_rl.rl.rollout.sampling import uniforms


def test_slots_are_used_again_and_keep_their_contents_when_they_grow() -> None:
    slots = Slots(torch.device("cpu"))
    slots.grow(2, 3)
    first, second = slots.take([7, 8], 3)
    places = slots.places(np.array([first, second]), np.array([1, 2]))
    slots.tokens.view(-1)[places] = torch.tensor([11, 12])
    slots.logprobs.view(-1)[places] = torch.tensor([-1.0, -2.0])
    slots.grow(4, 5)
    assert slots.uniforms.shape == slots.tokens.shape == slots.logprobs.shape == (4, 5)
    np.testing.assert_array_equal(slots.uniforms[[first, second], :3].numpy(), uniforms([7, 8], 3))
    tokens_NS, logprobs_NS = slots.read([second, first], 3)
    assert tokens_NS.tolist() == [[0, 0, 12], [0, 11, 0]] and tokens_NS.dtype == np.int32
    assert logprobs_NS.tolist() == [[0, 0, -2], [0, -1, 0]]
    assert len({first, second, *slots.take([1, 2], 2)}) == 4
    slots.free([second])
    assert slots.take([9], 5) == [second]
    np.testing.assert_array_equal(slots.uniforms[[second]].numpy(), uniforms([9], 5))
    with pytest.raises(IndexError):
        slots.take([1], 1)
