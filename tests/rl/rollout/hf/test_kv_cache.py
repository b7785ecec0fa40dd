from __future__ import annotations

import torch

from hpc_rl.rl.rollout.hf.kv_cache import KVCache


def test_a_cache_keeps_its_contents_when_it_grows() -> None:
    cache = KVCache(2, 3)
    key, value = torch.ones(1, 4, 5, 8, dtype=torch.float64), torch.ones(1, 4, 5, 6)
    before = [states.copy_(torch.randn_like(states)).clone() for states in cache.layer(0, key, value)]
    cache.grow(5, 7)
    assert (cache.rows, cache.columns) == (5, 7)
    for states, old, size in zip(cache.layer(0, key, value), before, (8, 6), strict=True):
        assert states.shape == (5, 4, 7, size) and states.dtype == old.dtype
        assert torch.equal(states[:2, :, :3], old)
        assert states.double().square().sum().isclose(old.double().square().sum())  # the rest is zero
    assert [states.shape[::2] for states in cache.layer(1, key, value)] == [(5, 7), (5, 7)]


def test_only_columns_of_a_row_are_copied() -> None:
    cache = KVCache(4, 5)
    key = torch.ones(1, 2, 1, 3)
    for states in cache.layer(0, key, key):
        states.copy_(torch.randn_like(states))
    before = [states.clone() for states in cache.layer(0, key, key)]
    cache.copy_rows([3, 1], [0, 2], 4)
    for states, old in zip(cache.layer(0, key, key), before, strict=True):
        assert torch.equal(states[[1, 3]], old[[1, 3]])
        assert torch.equal(states[[0, 2], :, :4], old[[3, 1], :, :4])
        assert torch.equal(states[[0, 2], :, 4:], old[[0, 2], :, 4:])
