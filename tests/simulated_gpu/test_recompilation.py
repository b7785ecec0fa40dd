"""Compiled layers run rows with any number of samples: torch.compile's own count of compiled frames."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel import sharding
from hpc_rl.training.parallel.distributed import World
from tests.marks import long
from tests.simulated_gpu.models import loading_without_files
from tests.simulated_gpu.process import simulate

STEPS = 12


def _compiled_frames(recompute: bool) -> list[int]:
    """Return the number of frames compiled after each step; step i has i + 2 samples, and two models take turns."""
    config = ModelConfig(path="/model", use_torch_compile=True, enable_gradient_checkpointing=recompute)
    torch._dynamo.reset()
    counters.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # Tracing is what depends on the samples, so that the backend need not produce machine code.
    eager = functools.partial(torch.compile, backend="eager")
    found = []
    try:
        with loading_without_files("tiny"), mock.patch.object(torch, "compile", eager):
            world, trainer = World(0, 2, torch.device("cpu")), TrainingConfig()
            policy = load_sharded(causal_lm(config), world, trainer)
            reference = load_sharded(causal_lm(config, trained=False), world, trainer)
        for step in range(STEPS):
            _train(policy, reference, samples=step + 2)
            found.append(counters["frames"]["total"])
    finally:
        dist.destroy_process_group()
    return found


def _train(policy: CausalLM, reference: CausalLM, samples: int) -> None:
    generator = np.random.default_rng(samples)
    tokens = [generator.integers(0, 1000, size=size) for size in generator.integers(5, 12, size=samples)]
    batch = pack_samples(tokens, [np.arange(len(ids)) > 2 for ids in tokens])
    loss = policy(batch, lambda hidden_NH, weight_VH: cross_entropy_sum(hidden_NH, weight_VH, batch.targets_N))
    with torch.no_grad():
        reference(batch, lambda hidden_NH, weight_VH: cross_entropy_sum(hidden_NH, weight_VH, batch.targets_N))
    sharding.reshard(reference)
    loss.backward()


@pytest.mark.parametrize("recompute", [long(False), True])
def test_nothing_is_compiled_again_for_another_number_of_samples(recompute: bool) -> None:
    frames = simulate(_compiled_frames, recompute)
    assert frames[0] > 0
    assert len(set(frames[1:])) == 1, frames
