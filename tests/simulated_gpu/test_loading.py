"""Loading, saving and the step after it on device `cuda`: nothing may stay in host memory, or mix with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch

from hpc_rl.training.parallel.distributed import World
from tests.helpers import make_tiny_model
from tests.simulated_gpu.gpu import simulated_gpus
from tests.simulated_gpu.process import simulate

T = TypeVar("T")
RANKS = 8


class _Rank0(World):
    """The view of rank 0, for which the other ranks agree with everything."""

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def broadcast(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag


def _load(path: str, role: str) -> dict[str, Any]:
    """Load a model, and copy it for a checkpoint."""
    from hpc_rl.config.training.common import ModelConfig, OptimConfig, TrainingConfig
    from hpc_rl.training.checkpoints import model_state
    from hpc_rl.training.models.causal_lm import causal_lm
    from hpc_rl.training.models.loading import load_sharded
    from hpc_rl.training.models.pretrained import Pretrained
    from hpc_rl.training.models.scalar_model import critic
    from hpc_rl.training.optim import build_optimizer

    config = ModelConfig(path=path)
    pretrained = critic(path, config) if role == "critic" else causal_lm(config)
    world = _Rank0(0, RANKS, torch.device("cuda", 0))
    whole = pretrained.load_module()  # transformers cannot load in the simulation
    with mock.patch.object(Pretrained, "load_module", lambda _: whole), simulated_gpus(ranks=RANKS) as gpu:
        model = load_sharded(pretrained, world, TrainingConfig(sharding="full"))
        live = gpu.live
        optimizer = build_optimizer(model, OptimConfig())
        found = model_state.snapshot(model, optimizer, None, world, copy=True)
        return {
            "live": live,
            "peak of the copy": gpu.peak - gpu.live,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "devices": {tensor.device.type for tensor in (*model.parameters(), *model.buffers())},
            "copies": {tensor.device.type for tensor in found.tensors.values()},
            "names": len(found.tensors),
            "traffic": dict(gpu.traffic),
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, vocab=640))


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_rank_reads_its_part_onto_its_gpu(model: str, role: str) -> None:
    found = simulate(_load, model, role)
    assert found["devices"] == {"cuda"}
    whole = 4 * found["parameters"]
    assert whole / RANKS <= found["live"] < 1.5 * whole / RANKS  # rows that do not divide evenly, and buffers
    assert not found["traffic"]
    assert found["copies"] == {"cpu"}
    assert found["peak of the copy"] == 0


def test_rank_0_sends_what_only_it_can_read(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.config.save_pretrained(tmp_path)
    torch.save(loaded.state_dict(), tmp_path / "pytorch_model.bin")
    found = simulate(_load, str(tmp_path), "policy")
    assert found["devices"] == {"cuda"}
    assert found["traffic"].keys() == {"broadcast_"}
    assert found["traffic"]["broadcast_"] == 4 * found["parameters"]
