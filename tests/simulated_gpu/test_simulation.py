"""The simulation itself: it counts what a GPU would hold and transfer, and refuses mixed devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.simulated_gpu.gpu import simulated_gpus
from tests.simulated_gpu.process import simulate

_SIZE = 1000


def _sharded_linear_step() -> dict[str, float]:
    with simulated_gpus(ranks=4) as gpu:
        model = nn.Linear(_SIZE, _SIZE, bias=False)
        fully_shard(model, mesh=init_device_mesh("cuda", (4,)))
        shard, calls = gpu.live, dict(gpu.calls)
        gpu.reset()
        loss = model(torch.ones(2, _SIZE, device="cuda")).sum()
        loss.backward()
        loss.item()
        return {"shard": shard, "peak": gpu.peak, "setup calls": sum(calls.values()), **gpu.traffic}


def _mixed_devices() -> None:
    with simulated_gpus(ranks=1):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_memory_and_traffic_of_one_sharded_layer() -> None:
    found = simulate(_sharded_linear_step)
    whole = 4 * _SIZE * _SIZE
    assert found["shard"] == whole / 4
    assert found["_allgather_base_"] >= whole
    assert found["_reduce_scatter_base_"] >= whole
    # The layer's shard, its gathered weight, and the gradient before and after the exchange.
    assert 2 * whole < found["peak"] < 4 * whole


def test_a_tensor_of_the_cpu_does_not_mix_with_one_of_the_gpu() -> None:
    with pytest.raises(RuntimeError, match="cuda"):
        simulate(_mixed_devices)
