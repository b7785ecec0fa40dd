"""Frozen weights in 4 bits below adapters (QLoRA, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

NF4 has 16 values; 64 neighbouring weights share a scale, and the scales are quantised again, so that a weight takes
0.52 bytes. bitsandbytes (https://huggingface.co/docs/bitsandbytes) stores them and multiplies by them.

The 4-bit weights are neither parameters nor buffers: FSDP, checkpoints and optimizers do not see them, and each rank
has all of them. Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from hpc_rl.errors import UserError


class FourBitWeight(nn.Module):
    """The weight of a linear layer in 4 bits, or the place for it before `store`."""

    def __init__(self, like_OI: torch.Tensor) -> None:
        """Take shape and type of a weight, and its values unless it is on the meta device."""
        super().__init__()
        self.shape, self.dtype, self.device = like_OI.shape, like_OI.dtype, like_OI.device
        self._packed: torch.Tensor | None = None
        self._state: Any = None
        if not like_OI.is_meta:
            self.store(like_OI.detach())

    def store(self, weight_OI: torch.Tensor) -> None:
        """Quantise a whole weight on its device."""
        functional = bitsandbytes().functional
        weight_OI = weight_OI.to(self.dtype).contiguous()
        self.device = weight_OI.device
        self._packed, self._state = functional.quantize_4bit(weight_OI, compress_statistics=True, quant_type="nf4")

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W' + bias in the type of `x`. Only `x` and the bias get gradients."""
        assert self._packed is not None, "the weight has not been loaded"
        product: torch.Tensor = bitsandbytes().matmul_4bit(x, self._packed.t(), quant_state=self._state, bias=bias)
        return product

    def dequantized(self) -> torch.Tensor:
        """Return the weight that the layer multiplies by, [O, I], in the type that it had before."""
        weight_OI: torch.Tensor = bitsandbytes().functional.dequantize_4bit(self._packed, self._state)
        return weight_OI


class FourBitLinear(nn.Module):
    """A frozen linear layer with a weight in 4 bits. Its bias keeps its name."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.four_bit = FourBitWeight(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.four_bit(x, self.bias)
        return y


def four_bit_weights(hf: nn.Module) -> dict[str, FourBitWeight]:
    """Return the weights in 4 bits by the names that they have in the model's files."""
    return {
        f"{name.rpartition('.')[0]}.weight": module
        for name, module in hf.named_modules()
        if isinstance(module, FourBitWeight)
    }


def rounded_to_four_bits(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return a weight in host memory as a layer with 4 bits has it, computed where training computes."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return FourBitWeight(weight_OI.to(device)).dequantized().cpu()


def bitsandbytes(otherwise: str = "remove model.lora.quantize") -> Any:
    """Return the library.

    Args:
        otherwise: what a user can do without it, for the error.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f"model.lora.quantize=nf4 needs bitsandbytes, which cannot be imported: {error}; install it by "
            f"pip install '.[qlora]' in the checkout of hpc-rl, or {otherwise}"
        ) from error
