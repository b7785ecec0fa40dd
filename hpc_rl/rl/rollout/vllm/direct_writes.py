"""Weights that a model of vLLM writes into its parameters itself, and not through the loaders of the parameters.

While vLLM replaces weights, parameters have no memory. vLLM's loaders keep the weights until those of a layer are
complete. What a model writes directly would be lost without an error: in gpt-oss, its experts and attention sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode


class DirectWrites(TorchFunctionMode):
    """Give weights that a model writes directly to vLLM's loaders.

    Args:
        model: of vLLM; its `load_weights` is called inside of this context.
    """

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.meta import CopyCounter

        super().__init__()
        self._counter = CopyCounter
        self._places = {
            weight.untyped_storage()._cdata: (layer, name, weight)
            for layer in model.modules()
            for name, weight in layer.named_parameters(recurse=False)
            if weight.is_meta
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # vLLM's loaders write too, to count elements.
        if func is torch.Tensor.copy_ and args[0].is_meta and type(_get_current_dispatch_mode()) is not self._counter:
            place = self._places.get(args[0].untyped_storage()._cdata)
            if place is not None:
                _hand_over(*place, args[0], args[1])
                return args[0]
        return func(*args, **(kwargs or {}))


def _hand_over(layer: nn.Module, name: str, weight: nn.Parameter, target: torch.Tensor, value: torch.Tensor) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader

    if target.shape != weight.shape:
        raise RuntimeError(f"{type(layer).__name__} writes a part of {name} directly, which a weight sync would lose")
    loaders: Any = weight
    loaders.weight_loader = _write
    loaders.weight_loader = make_online_process_loader(layer, name)
    loaders.weight_loader(weight, value)


def _write(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:  # vLLM reads these names
    param.data.copy_(loaded_weight)
