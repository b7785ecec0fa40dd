from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_rl.config.training.common import OptimConfig
from hpc_rl.training.optim import build_optimizer, clip_gradients, lr_factor


def test_warm_up_and_cosine() -> None:
    config = OptimConfig(warmup_ratio=0.2, min_lr_ratio=0.1)
    factors = [lr_factor(config, step, 10) for step in range(11)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[6] == pytest.approx(0.55)
    assert factors[10] == pytest.approx(0.1)
    assert factors[2:] == sorted(factors[2:], reverse=True)


def test_linear_and_constant() -> None:
    linear = OptimConfig(lr_scheduler="linear", warmup_ratio=0.0)
    assert [lr_factor(linear, step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = OptimConfig(lr_scheduler="constant", warmup_ratio=0.5)
    assert [lr_factor(constant, step, 4) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_a_warm_up_of_all_steps() -> None:
    assert lr_factor(OptimConfig(warmup_ratio=1.0), 0, 1) == 0.5


def test_norms_and_biases_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(module, OptimConfig(lr=0.1, weight_decay=0.5)).step()
    assert module[0].weight.unique().item() == pytest.approx(0.95)
    assert all(p.unique().item() == 1.0 for p in (module[0].bias, module[1].weight, module[1].bias))


def test_clipping_is_by_the_global_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients(parameters, limit=10.0) == 5.0
    assert parameters[1].grad[1] == 4.0
    assert clip_gradients(parameters, limit=1.0) == 5.0
    assert parameters[1].grad[1] == pytest.approx(0.8, abs=1e-5)
    assert clip_gradients(parameters, limit=0.0) == pytest.approx(1.0)
