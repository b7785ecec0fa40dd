"""AdamW with its two moments in 8 bits (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861).

Each value is one of 256 numbers, times a scale that a block of neighbouring values shares. torchao
(https://github.com/pytorch/ao) has the numbers, and computes the step in float32. Between steps, codes and scales are
ordinary tensors. FSDP divides them like the rows of their weight, and no block is longer than a row
(hpc_rl.config.training.moments): they do not depend on the number of ranks, and checkpoints have them as they are.

Moments of small weights, norms and biases have the type of the weight. Shape suffixes: B blocks of a rank, S values of
a block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from hpc_rl.config.training.moments import block_of
from hpc_rl.errors import UserError
from hpc_rl.training.parallel.sharding import own_part
from hpc_rl.training.param_groups import only

CODES, SCALE = "_codes", "_scale"
"""Ends of the names of a moment's two tensors."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
PIECE = 1 << 20
"""Values that a CPU changes at a time, because it needs many bytes for each of them meanwhile."""


class EightBitAdamW(torch.optim.AdamW):
    """AdamW that also changes parameters whose moments have 8 bits. `new_moments` makes their state.

    Raises:
        UserError: torchao cannot be imported.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        torchao("adam")
        super().__init__(*arguments, **named)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Change all parameters that have a gradient."""
        others = set()
        for group in self.param_groups:
            lr = torch.tensor(group["lr"])  # each new number would compile the step again
            for parameter in group["params"]:
                if not has_eight_bits(self.state[parameter]):
                    others.add(parameter)
                elif parameter.grad is not None:
                    _step(parameter, self.state[parameter], group, lr)
        with only(self, others):
            super().step()


def new_moments(parameter: nn.Parameter) -> dict[str, torch.Tensor] | None:
    """Return codes and scales of moments that are 0, on the parameter's device; None if they are not to have 8 bits."""
    block = block_of(parameter.shape)
    if block is None:
        return None
    first_of_row = parameter.detach().narrow(-1, 0, parameter.shape[-1] // block)
    return {
        **{name + CODES: torch.zeros_like(parameter, dtype=torch.uint8) for name in (FIRST, SECOND)},
        **{name + SCALE: torch.zeros_like(first_of_row, dtype=torch.float32) for name in (FIRST, SECOND)},
    }


def has_eight_bits(names: Iterable[str]) -> bool:
    """Return whether there are moments in 8 bits among tensors with these names."""
    return any(name.endswith(CODES) for name in names)


def torchao(module: str) -> Any:
    """Return a module of the library's optimizers.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return importlib.import_module(f"torchao.optim.{module}")
    except ImportError as error:
        raise UserError(
            f"optim.moments=8bit needs torchao, which cannot be imported: {error}; install it by pip install "
            "'.[torchao]' in the checkout of hpc-rl, or set optim.moments=float32"
        ) from error


def _step(parameter: nn.Parameter, state: dict[str, torch.Tensor], group: dict[str, Any], lr: torch.Tensor) -> None:
    """Change this rank's part of a parameter, and of its moments."""
    assert parameter.grad is not None
    state["step"] += 1
    own = {name: own_part(tensor) for name, tensor in state.items()}
    weight, scale_B = own_part(parameter), own[FIRST + SCALE].view(-1)
    if not weight.numel():
        return
    size = weight.numel() // scale_B.numel()
    whole = [
        *(weight.view(-1, size), own_part(parameter.grad).reshape(-1, size)),
        *(own[FIRST + CODES].view(-1, size), scale_B),
        *(own[SECOND + CODES].view(-1, size), own[SECOND + SCALE].view(-1)),
    ]
    at_once = max(1, PIECE // size) if weight.device.type == "cpu" else scale_B.numel()
    change, (beta1, beta2) = _change(weight.device), group["betas"]
    for piece in zip(*(tensor.split(at_once) for tensor in whole), strict=True):
        change(*piece, own["step"], lr, beta1, beta2, group["weight_decay"], group["eps"])


@cache
def _change(device: torch.device) -> Callable[..., None]:
    """Return the function that changes some blocks. It is compiled for accelerators, where it would otherwise be dozens
    of kernels. For CPUs, the compilation would take longer than many a run."""
    adam, moment = torchao("adam").single_param_adam, torchao("subclass_8bit").OptimState8bit
    signed, unsigned = (moment.zeros((1,), signed=signed, block_size=1, device=device).qmap for signed in (True, False))

    def change(
        weight_BS: torch.Tensor,
        gradient_BS: torch.Tensor,
        first_BS: torch.Tensor,
        first_B: torch.Tensor,
        second_BS: torch.Tensor,
        second_B: torch.Tensor,
        step: torch.Tensor,
        lr: torch.Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
    ) -> None:
        adam(
            *(weight_BS, gradient_BS, step),
            *(moment(first_BS, first_B, signed, True, torch.float32),),
            *(moment(second_BS, second_B, unsigned, False, torch.float32), None),
            *(lr, beta1, beta2, weight_decay, eps, True, False),
        )
        # A second moment that is rounded to 0 would make the next step very large if the gradient is 0 then and the
        # first moment is not (https://arxiv.org/abs/2309.01507). The smallest number above 0 takes its place.
        second_BS.clamp_(min=1)

    return change if device.type == "cpu" else torch.compile(change, fullgraph=True)
