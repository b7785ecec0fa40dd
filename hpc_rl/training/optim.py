"""AdamW, the learning rate as a function of the step, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.common import OptimConfig
from hpc_rl.training.eight_bit import FIRST, SECOND, EightBitAdamW, new_moments


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Build a fused AdamW (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101).

    Norms and biases, which are the parameters with fewer than two dimensions, have no weight decay. All state exists
    from the start, so that a checkpoint can be read into it.

    Raises:
        UserError: the moments are to have 8 bits, and torchao cannot be imported.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # The learning rate is a number because a tensor would be copied in each step.
    adamw = EightBitAdamW if config.moments == "8bit" else torch.optim.AdamW
    optimizer = adamw(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for parameter in parameters:
        moments = new_moments(parameter) if config.moments == "8bit" else None
        if moments is None:
            moments = {name: torch.zeros_like(parameter) for name in (FIRST, SECOND)}
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **moments,
        }
    return optimizer


def lr_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step (the first is 0) as a fraction of the peak.

    The fraction rises linearly over the warm-up and reaches 1 at its end; then it falls to min_lr_ratio, as half a
    cosine wave or as a line, or stays at 1.
    """
    warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.lr_scheduler == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    fall = 1.0 - progress if config.lr_scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * fall


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their global norm is at most `limit` (0 for no limit).

    Returns:
        the norm before scaling, over all ranks; the same number on every rank.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value = float(norm)
    # Scaling only if needed saves a pass over all gradients in most steps.
    if 0 < limit < value < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return value
