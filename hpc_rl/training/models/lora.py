"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) beside the linear layers of a model.

A layer with an adapter keeps its weight and the name of its weight, so that loading, sharding and export see the same
model. Only the adapters are trained, in float32; the model's weights are frozen in model.dtype.

Shape suffixes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from hpc_rl.config.training.common import LoraConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.peft_folder import (
    DOWN,
    PREFIX,
    UP,
    WEIGHTS,
    PeftFolder,
    matching,
    new_config,
    read_peft_folder,
    refuse_other_base,
)
from hpc_rl.training.models.four_bit import FourBitLinear
from hpc_rl.training.models.safetensors_files import contents
from hpc_rl.training.wrappers import is_cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "model.lora.path"
_READ = {
    "BambaMixer": "out_proj",
    "FalconH1Mixer": "out_proj",
    "Gemma3nTextAltUp": "correction_coefs",
    "GraniteMoeHybridMambaLayer": "out_proj",
    "JambaMambaMixer": "dt_proj",
    "LongcatFlashTopkRouter": "classifier",
    "NemotronHMamba2Mixer": "out_proj",
}
"""Class of transformers -> a linear layer of it whose weight it reads, and which it does not always call: this one can
have neither an adapter nor 4 bits."""


class Matrix(nn.Module):
    """One of an adapter's two matrices, with the name that it has in peft's files: `weight`."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=device))


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter: x W' + bias + alpha / rank * (x A') B'. It has the layer's parameters."""

    def __init__(self, layer: nn.Linear | FourBitLinear, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        self.four_bit = layer.four_bit if isinstance(layer, FourBitLinear) else None
        self.weight = None if isinstance(layer, FourBitLinear) else layer.weight
        self.bias = layer.bias
        self.dropout = nn.Dropout(dropout)
        device = layer.four_bit.device if isinstance(layer, FourBitLinear) else layer.weight.device
        self.lora_A = Matrix(rank, layer.in_features, device)
        self.lora_B = Matrix(layer.out_features, rank, device)
        self.is_enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute in the type of `x`. The scale is applied where the tensor is smallest."""
        y = F.linear(x, self.weight, self.bias) if self.four_bit is None else self.four_bit(x, self.bias)
        if not self.is_enabled:
            return y
        down_RI, up_OR = self.lora_A.weight.to(x.dtype), self.lora_B.weight.to(x.dtype)
        low_TR = F.linear(self.dropout(x), down_RI).flatten(0, -2) * self.scale
        return torch.addmm(y.flatten(0, -2), low_TR, up_OR.t()).view(y.shape)


def merged(weight_OI: torch.Tensor, down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the weight of a linear layer that computes the same as the layer and its adapter, float32."""
    return torch.addmm(weight_OI.float(), up_OR.float(), down_RI.float(), alpha=scale)


def rounded(weight: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Round a merged float32 weight to the type of an engine or of an exported model.

    bfloat16 has steps of 1/256 to 1/128 of a value, and the changes by adapters are often smaller. Rounding to the
    nearest value would lose them: the result would be the weights of the base. Stochastic rounding (Gupta et al.
    2015, https://arxiv.org/abs/1502.02551) takes one of the two neighbours with probabilities that keep the mean. The
    draws depend on the name and on the kind of device, whose generators of random numbers differ: on one kind, all
    engines and exports get the same weights; an export on a CPU has others of the same distribution than a GPU.
    """
    if dtype != torch.bfloat16:
        return weight.to(dtype)
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    draws = torch.randint(1 << 16, weight.shape, generator=generator, dtype=torch.int32, device=weight.device)
    # bfloat16 is the upper half of float32: a carry from the lower half is the step to the next value.
    return ((weight.view(torch.int32) + draws) & -(1 << 16)).view(torch.float32).to(dtype)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    base: str
    """The option model.path."""
    rank: int
    alpha: float
    dropout: float
    layers: tuple[str, ...]
    """Names of the layers that have one."""
    targets: tuple[str, ...]
    """Names that select these layers and no others in peft."""
    source: PeftFolder | None
    """Where their first values are; None for new ones."""

    def peft_config(self, head: str | None) -> dict[str, Any]:
        """Return the contents of adapter_config.json; see `new_config`."""
        return new_config(self.base, self.rank, self.alpha, self.dropout, self.targets, head)


def blocks_of(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks of a model, which may be divided: FSDP gives each a subclass of its class. Mamba
    names parts of its blocks too, which are not blocks."""
    names, found, inside = set(hf._no_split_modules or ()), list[nn.Module](), set[int]()
    for module in hf.modules():
        if id(module) not in inside and not names.isdisjoint(kind.__name__ for kind in type(module).__mro__):
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    return found


def text_blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks of a model's language model, and not of what reads images."""
    text = {id(module) for module in hf.get_decoder().modules()}
    return [block for block in blocks_of(hf) if id(block) in text]


def block_linears(hf: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of the language model's transformer blocks by name, but for those that are not called,
    and routers that return more than a product (Phi-3.5-MoE)."""
    inside = {id(module) for block in text_blocks(hf) for module in block.modules()}
    read = {f"{name}.{_READ.get(type(module).__name__)}" for name, module in hf.named_modules()}
    return {
        name: m
        for name, m in hf.named_modules()
        if getattr(type(m), "forward", None) is nn.Linear.forward and id(m) in inside and name not in read
    }


def add_adapters(hf: PreTrainedModel, config: LoraConfig, base: str) -> Adapters:
    """Give linear layers adapters, whose values are 0 until `initial_values` are set; freeze all other parameters, and
    quantise the weights of all linear layers of the blocks if the configuration says so.

    Args:
        base: the option model.path.

    Raises:
        UserError: no layer has such a name, or the adapters to continue from are not for this model.
    """
    linear = block_linears(hf)
    source = None
    if config.path is not None:
        source = read_peft_folder(KEY, Path(config.path))
        refuse_other_base(KEY, source, base, {f"{name}.weight": tuple(m.weight.shape) for name, m in linear.items()})
        names: Sequence[str] = source.modules
        rank, alpha = source.rank, source.alpha
    else:
        assert config.rank is not None
        names = matching(config.target_modules, linear, (name for name, _ in hf.named_parameters()))
        rank = config.rank
        alpha = config.alpha_of_new
    if not names:
        raise UserError(f"model.lora: the transformer blocks of model.path {base} have no linear layers")
    hf.requires_grad_(False)
    targets, chosen = _shortest(names, hf), set(names)
    for name, layer in linear.items():
        frozen = layer if config.quantize is None else FourBitLinear(layer)
        new = LoraLinear(frozen, rank, alpha / rank, config.dropout) if name in chosen else frozen
        if new is not layer:
            parent, _, child = name.rpartition(".")
            setattr(hf.get_submodule(parent), child, new)
    return Adapters(base, rank, alpha, config.dropout, tuple(names), targets, source)


def new_like(config: LoraConfig) -> LoraConfig:
    """Return the options of new adapters with the shape of those to continue from: for a critic beside a policy.

    Raises:
        UserError: the folder cannot be read.
    """
    if config.path is None:
        return config
    source = read_peft_folder(KEY, Path(config.path))
    targets = sorted({name.rpartition(".")[2] for name in source.modules})
    return LoraConfig(rank=source.rank, alpha=source.alpha, target_modules=targets, quantize=config.quantize)


def _shortest(names: Sequence[str], hf: nn.Module) -> tuple[str, ...]:
    """Return the last parts of the layers' names if these select the same layers, else the whole names."""
    if is_cut(hf):  # its other parts may have layers of the same names
        return tuple(names)
    last = sorted({name.rpartition(".")[2] for name in names})
    selected = {name for name, _ in hf.named_modules() if name.rpartition(".")[2] in last}
    return tuple(names) if selected - set(names) else tuple(last)


def adapted_layers(hf: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter by name."""
    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLinear)}


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return f".{DOWN}." in name or f".{UP}." in name


@contextmanager
def without_adapters(hf: nn.Module) -> Iterator[None]:
    """Compute with the frozen model alone, the reference of DPO and reinforcement learning."""
    layers = adapted_layers(hf).values()
    for layer in layers:
        layer.is_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_enabled = True


def initial_values(hf: nn.Module, adapters: Adapters, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole first value of the adapters' parameters, equal on all ranks.

    Those to continue from come from their folder. Of new ones, A is uniform as in a new linear layer and B is 0, so
    that training starts with the model itself.

    Raises:
        UserError: the folder cannot be read.
    """
    if adapters.source is not None:
        yield from _stored_values(hf, adapters.source)
        return
    for name in adapters.layers:
        layer = hf.get_submodule(name)
        assert isinstance(layer, LoraLinear)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        bound = 1 / math.sqrt(layer.in_features)  # the variance that nn.Linear has
        down_RI = torch.empty(adapters.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        yield f"{name}.{DOWN}.weight", down_RI
        yield f"{name}.{UP}.weight", torch.zeros(layer.out_features, adapters.rank)


def _stored_values(hf: nn.Module, source: PeftFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values in a folder. A head in it is for a model with such a head."""
    parameters = {name for name, _ in hf.named_parameters()}
    try:
        for key, stored in contents(source.path / WEIGHTS).items():
            name = key.removeprefix(PREFIX)
            if name in parameters:
                rows = [part.clone() for _, part in stored.rows(0, stored.shape[0])]
                yield name, torch.cat(rows)
    except (OSError, ValueError) as error:
        raise UserError(f"{KEY} {source.path} cannot be read: {error}") from error
