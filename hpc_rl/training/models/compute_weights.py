"""Weights in bfloat16 for a model that one GPU has to itself, made once per optimizer step.

FSDP converts the weights of a layer each time it gathers them, which is twice per micro-batch, and calls hooks around
each layer. Here all float32 weights are converted at the first forward pass and are in the modules until `leave`.
Outside of this time, optimizer, checkpoints and weight sync find the float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


class ComputeWeights:
    """The copies of a model's float32 weights with which it computes, as FSDP's MixedPrecisionPolicy has them.

    A gradient is added to the gradient of the float32 weight, in float32, as soon as autograd has it.

    Args:
        model: may be on the meta device; its memory is allocated later.
        exact: modules that compute in float32.
    """

    def __init__(self, model: nn.Module, exact: Sequence[nn.Module], dtype: torch.dtype = torch.bfloat16) -> None:
        self._model = model
        self._exact = {part for module in exact for part in module.modules()}
        self._dtype = dtype
        self._copies: dict[nn.Parameter, nn.Parameter] | None = None
        """Weight -> copy, whose storage is empty outside."""
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        """Parameters of a module, name, and the weight of that name; a tied weight has several places."""
        self._is_in = False
        model.register_forward_pre_hook(lambda *_: self._enter())
        for module in exact:
            module.register_forward_pre_hook(_to_float32)

    def leave(self) -> None:
        """Put the float32 weights back, and free the copies."""
        if not self._is_in:
            return
        assert self._copies is not None
        for parameters, name, weight in self._places:
            parameters[name] = weight
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)
        self._is_in = False

    @torch.no_grad()
    def _enter(self) -> None:
        if self._is_in:
            return
        if self._copies is None:
            self._copies = self._make()
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.nbytes)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), list(self._copies))
        for parameters, name, weight in self._places:
            parameters[name] = self._copies[weight]
        self._is_in = True

    def _make(self) -> dict[nn.Parameter, nn.Parameter]:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is None or weight.dtype != torch.float32 or module in self._exact:
                    continue
                if weight not in copies:
                    memory = torch.empty_like(weight, dtype=self._dtype)
                    copies[weight] = nn.Parameter(memory, requires_grad=weight.requires_grad)
                    if weight.requires_grad:
                        copies[weight].register_post_accumulate_grad_hook(_adds_to(weight))
                self._places.append((module._parameters, name, weight))
        return copies


def _adds_to(weight: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def add(copy: torch.Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad.add_(gradient)

    return add


def _to_float32(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return tree_map(lambda value: value.float() if isinstance(value, torch.Tensor) else value, inputs)
