"""Load a model that is sharded over ranks, without a whole copy in any process.

The module is built without memory for its parameters (pretrained.py) and sharded; then each rank reads its own rows of
each weight from the safetensors files. Where stored weights and parameters do not correspond one to one (other file
formats, merged experts, renamed weights), rank 0 loads the whole model with transformers and sends it piece by piece.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.formats.model_options import refuse_unsplittable
from hpc_rl.training.models import lora
from hpc_rl.training.models.attention.packed_attention import use_flash_attention_3
from hpc_rl.training.models.attention.packed_check import check_packing
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.models.compiled import compile_layers
from hpc_rl.training.models.four_bit import four_bit_weights
from hpc_rl.training.models.pretrained import Pretrained, weight_files
from hpc_rl.training.models.safetensors_files import BUFFER_BYTES, Stored, contents
from hpc_rl.training.models.stored_form import follow_files, only_renames
from hpc_rl.training.parallel import sharding
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sequence_parallel import join

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PackedModel)
_PART = re.compile(r"(model\.)?(language_model\.)?layers\.\d+(?=\.)|(model\.)?\w+")
"""The part of a model to which a weight belongs: a layer, or a module of the first level."""
Tensors = dict[str, torch.Tensor]


class LoadingOptions(sharding.ShardingOptions, Protocol):
    """What loading depends on in the section `trainer`."""

    @property
    def seed(self) -> int: ...
    @property
    def sequence_parallel(self) -> int: ...
    @property
    def packing(self) -> bool: ...


def load_sharded(pretrained: Pretrained[Model], world: World, trainer: LoadingOptions) -> Model:
    """Load a model onto the ranks' devices. Every rank calls this. A single CPU process loads it whole.

    Raises:
        AgreedError: no model can be loaded, or it cannot be used; every rank raises this.
    """
    pretrained = replace(pretrained, packing=trainer.packing)
    use_flash_attention_3(world)
    sequence = join(world, trainer.sequence_parallel)
    whole = not sharding.is_sharded(world)
    model = world.together(pretrained.load) if whole else _load_parts(pretrained, world, trainer)
    model.sequence = sequence
    world.together(lambda: set_adapters(model, trainer.seed))
    check_packing(model, world)
    if world.is_main and (left := getattr(model.hf, "left_out", ())) and pretrained.key == "model.path":
        print(f"{pretrained.path} also has {_summary(left)}, which are not loaded and not trained", flush=True)
    if model.prepared is not None and trainer.packing:
        compile_layers(model, model.prepared, world)
    return model


def _summary(names: Iterable[str]) -> str:
    """Return the first parts of names of weights, with the number of weights of each."""
    parts = Counter(match[0] for name in names if (match := _PART.match(name)))
    return ", ".join(f"{part} ({counted(number, 'weight')})" for part, number in sorted(parts.items()))


def set_adapters(model: PackedModel, seed: int) -> None:
    """Give the adapters of a model their first values: this rank's part of them. Nothing happens without adapters.

    Raises:
        UserError: the adapters to continue from cannot be read.
    """
    if model.adapters is None:
        return
    weights = weights_of(model.hf)
    for name, value in lora.initial_values(model.hf, model.adapters, seed):
        first, local = _local(weights[name])
        local.copy_(value[first : first + len(local)])


def _load_parts(pretrained: Pretrained[Model], world: World, trainer: LoadingOptions) -> Model:
    hf = world.together(pretrained.empty)
    if trainer.sequence_parallel > 1:
        settings, size = hf.config.to_dict(), trainer.sequence_parallel
        world.together(lambda: refuse_unsplittable(pretrained.key, pretrained.path, settings, size))
    stored = world.together(lambda: stored_weights(pretrained, hf))
    # Some ranks may not find a file, for example without a connection to the hub. All have to load in the same way.
    if world.any(stored is None) or stored is None:
        return _from_rank_0(pretrained, hf, world, trainer)
    missing = frozenset(weights_of(hf).keys() - stored.keys())
    model = world.together(lambda: pretrained.wrap(hf, missing))
    _shard(model, world, trainer)
    if missing and world.is_main:
        print(f"{pretrained.path} has no {', '.join(sorted(missing))}: values start at 0", flush=True)
    world.together(lambda: _read(pretrained, hf, stored, world.device))
    return model


def weights_of(hf: nn.Module) -> Tensors:
    """Return parameters and persistent buffers by name; tied ones have one name."""
    persistent = hf.state_dict().keys()
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in hf.named_parameters()} | buffers


def trained_weights(model: PackedModel) -> Tensors:
    """Return what a checkpoint has of a model, by name, tied weights once: the adapters and the head that are trained,
    or, of a model without adapters, all parameters and persistent buffers."""
    if model.adapters is not None:
        return {name: weight.detach() for name, weight in model.hf.named_parameters() if weight.requires_grad}
    return weights_of(model.hf)


def stored_weights(pretrained: Pretrained[Any], hf: PreTrainedModel) -> dict[str, Stored] | None:
    """Return where the weights of a module are stored, or None if transformers has to load them.

    Raises:
        UserError: a file cannot be read.
    """
    if getattr(hf.config, "quantization_config", None) or _in_other_types(hf):
        return None
    try:
        files = weight_files(pretrained.path)
        found = {name: stored for file in files or () for name, stored in contents(file).items()}
    except (OSError, ValueError) as error:
        raise UserError(f"{pretrained.key}: the weights in {pretrained.path!r} cannot be read: {error}") from error
    own = follow_files(hf, found) if found else {}
    if not only_renames(hf):
        return None
    found = {own.get(name, name): stored for name, stored in found.items()}
    weights = weights_of(hf)
    unexpected = {name for name in found.keys() - weights.keys() if not pretrained.is_unused(name, hf)}
    missing = {name for name in weights.keys() - found.keys() if not pretrained.may_be_new(name)}
    fits = all(found[name].shape == weight.shape for name, weight in weights.items() if name in found)
    if not found or unexpected or missing or not fits:
        return None  # transformers explains what does not fit
    return {name: stored for name, stored in found.items() if name in weights}


def _in_other_types(hf: PreTrainedModel) -> bool:
    """Return whether transformers keeps some weights in float32 even if the model has another type."""
    kept = getattr(hf, "_keep_in_fp32_modules", None) or getattr(hf, "_keep_in_fp32_modules_strict", None)
    return bool(kept) and hf.dtype != torch.float32


def _shard(model: PackedModel, world: World, trainer: LoadingOptions) -> None:
    """Shard a model without memory, then give each rank memory for its part. Tied parameters stay tied."""
    sharding.shard(model, world, trainer)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                memory = torch.empty_like(parameter, device=world.device)
                made[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])
    if model.compute_weights is None:
        model.to(world.device)  # FSDP takes note of the new parameters


def _read(pretrained: Pretrained[Any], hf: PreTrainedModel, stored: Mapping[str, Stored], device: torch.device) -> None:
    """Read this rank's part of each weight, and weights in 4 bits whole; weights that are not stored become 0."""
    weights, four_bit = weights_of(hf), four_bit_weights(hf)
    for name in weights.keys() - stored.keys():
        _local(weights[name])[1].zero_()
    in_order = sorted(stored, key=lambda name: (stored[name].file, stored[name].offset))
    try:
        for name in in_order:
            if name in four_bit:
                rows = [part.to(device, copy=True) for _, part in stored[name].rows(0, stored[name].shape[0])]
                four_bit[name].store(torch.cat(rows))
                continue
            first, local = _local(weights[name])
            for row, part in stored[name].rows(first, len(local)):
                local[row - first :][: len(part)].copy_(part.to(local.device))
    except (OSError, ValueError) as error:
        raise UserError(f"{pretrained.key}: the weights in {pretrained.path!r} cannot be read: {error}") from error


def _from_rank_0(pretrained: Pretrained[Model], hf: PreTrainedModel, world: World, trainer: LoadingOptions) -> Model:
    """Load the whole model on rank 0, and send it to all ranks piece by piece."""
    whole, missing = world.together(lambda: pretrained.load_module() if world.is_main else (None, frozenset()))
    sources = weights_of(whole) if whole is not None else {}
    listed = {name: (list(weight.shape), str(weight.dtype)) for name, weight in sources.items()}
    listed, absent = world.broadcast((listed, sorted(missing)))
    described = {name: (torch.Size(shape), _dtype(dtype)) for name, (shape, dtype) in listed.items()}
    world.together(lambda: _take_types(hf, described))
    model = world.together(lambda: pretrained.wrap(hf, frozenset(absent)))
    _shard(model, world, trainer)
    for name, weight in weights_of(hf).items():
        first, local = _local(weight)
        if name not in described:  # an adapter
            continue
        for row, part in _pieces(sources.pop(name, None), described[name], world):
            low, high = max(row, first), min(row + len(part), first + len(local))
            if low < high:
                local[low - first : high - first].copy_(part[low - row : high - row])
    for name, place in four_bit_weights(hf).items():
        parts = [part for _, part in _pieces(sources.pop(name, None), described[name], world)]
        place.store(torch.cat(parts))
    return model


def _dtype(name: str) -> torch.dtype:
    """Return the type that torch prints as `name`: torch.bfloat16."""
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def _take_types(hf: PreTrainedModel, described: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """Give the parameters of an empty module the types that they have in a loaded one.

    Raises:
        UserError: the two do not have the same parameters.
    """
    weights = weights_of(hf)
    both = weights.keys() & described.keys()
    other = weights.keys() ^ described.keys() | {name for name in both if weights[name].shape != described[name][0]}
    if other:
        raise UserError(
            f"{hf.config.name_or_path} cannot be sharded: {', '.join(sorted(other)[:3])} ({len(other)} in all) differ "
            "between its configuration and its weights; save the model again with save_pretrained"
        )
    for name, parameter in hf.named_parameters():
        if parameter.dtype != described[name][1]:
            parameter.data = parameter.data.to(described[name][1])


def _pieces(
    source: torch.Tensor | None, described: tuple[torch.Size, torch.dtype], world: World
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (number of the first row, some rows) of a tensor that only rank 0 has."""
    shape, dtype = described
    rows = shape if shape else torch.Size([1])
    step = max(1, BUFFER_BYTES // max(1, rows[1:].numel() * dtype.itemsize))
    for row in range(0, rows[0], step):
        count = min(step, rows[0] - row)
        if source is None:
            part = torch.empty(count, *rows[1:], dtype=dtype, device=world.device)
        else:
            part = source.view(rows)[row : row + count].to(world.device).contiguous()
        dist.broadcast(part, group_src=0, group=world.group)
        yield row, part


def _local(weight: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return this rank's rows of a weight, and the number of the first one.

    FSDP splits rows as torch.chunk does: all ranks have the same number, but the last ones may have fewer or none.
    """
    if not isinstance(weight, DTensor):
        return 0, weight if weight.ndim else weight.view(1)
    first = 0
    for dimension, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            mesh = weight.device_mesh
            step = math.ceil(len(weight) / mesh.size(dimension))
            first = min(len(weight), step * mesh.get_local_rank(dimension))
    return first, weight.to_local()
