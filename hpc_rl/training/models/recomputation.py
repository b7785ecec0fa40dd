"""Layers that are computed again in the backward pass, and their inputs, which may wait in host memory.

A recomputed layer keeps only its input, [1, T, H]. transformers calls torch's checkpoint for each layer, which keeps
the input as autograd keeps any tensor, so that hooks can move it:
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_rl.config.training.common import ModelConfig, recomputed_layers
from hpc_rl.errors import UserError
from hpc_rl.training.parallel.side_stream import SideStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpoint = Callable[..., Any]
"""Calls its first argument with the others, and again in the backward pass."""


def recompute(hf: PreTrainedModel, layers: Sequence[nn.Module], config: ModelConfig) -> None:
    """Let layers of a model be computed again in the backward pass, as configured.

    Raises:
        UserError: the layers have no switch for recomputation, and the configuration needs one.
    """
    if not config.enable_gradient_checkpointing:
        return
    # transformers 5 introduced the new name, and transformers 6 removes the old one.
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if config.enable_gradient_checkpointing is True and not config.enable_activation_offload:
        return
    if not all(hasattr(layer, "_gradient_checkpointing_func") for layer in layers):
        raise UserError(
            f"models of type {hf.config.model_type} have layers without a switch for recomputation: use "
            "model.enable_gradient_checkpointing=true without model.enable_activation_offload, or another model"
        )
    chosen = recomputed_layers(config.enable_gradient_checkpointing, len(layers))
    inputs = HostInputs()
    for number, layer in enumerate(layers):
        switches: Any = layer
        switches.gradient_checkpointing = number in chosen
        if config.enable_activation_offload:
            switches._gradient_checkpointing_func = inputs.kept_by(switches._gradient_checkpointing_func)


class HostInputs:
    """The inputs of a model's recomputed layers. Each moves to host memory while its layer computes, and comes back
    while the layer after it computes its gradients. The device holds at most two of them."""

    def __init__(self) -> None:
        self._side: SideStream | None = None
        self._newest: Callable[[], _Input | None] = lambda: None

    def kept_by(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint whose inputs are kept here."""

        def call(*args: Any, **kwargs: Any) -> Any:
            # Only the checkpoint's own inputs arrive here: it has other hooks for what the layer would keep.
            with torch.autograd.graph.saved_tensors_hooks(self._leave, self._come_back):
                return checkpoint(*args, **kwargs)

        return call

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor | _Input:
        if not tensor.numel():  # the checkpoint's handle for autograd
            return tensor
        self._side = self._side or SideStream(tensor.device)
        before = self._newest()
        if before is not None:
            # The memory may be used again, by what the device computes after the copy. record_stream would free it only
            # after the host has seen the end of the copy, and the host is many layers ahead of the device.
            self._side.await_mark(before.moved)
            before.on_device = None
        found = _Input(tensor.detach(), self._side, before)
        self._newest = weakref.ref(found)
        return found

    def _come_back(self, kept: torch.Tensor | _Input) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        assert self._side is not None
        kept.begin_return(self._side)
        self._side.await_mark(kept.moved)
        tensor, kept.on_device = kept.on_device, None
        assert tensor is not None
        if (following := kept.before()) is not None:
            following.begin_return(self._side)
        return tensor


class _Input:
    """The input of a layer.

    Args:
        tensor: on the device. Its copy to the host begins.
        before: the input of the layer before it.
    """

    def __init__(self, tensor: torch.Tensor, side: SideStream, before: _Input | None) -> None:
        self.before: Callable[[], _Input | None] = (lambda: None) if before is None else weakref.ref(before)
        self.on_device: torch.Tensor | None = tensor
        self._device = tensor.device
        self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=side.pins)
        with side.copying():
            self._on_host.copy_(tensor, non_blocking=True)
        self.moved = side.mark()
        """Event at the end of the latest copy."""

    def begin_return(self, side: SideStream) -> None:
        """Begin to copy the input to the device, if it is not there."""
        if self.on_device is not None:
            return
        self.on_device = torch.empty_like(self._on_host, device=self._device)
        with side.copying():
            self.on_device.copy_(self._on_host, non_blocking=True)
        self.moved = side.mark()
