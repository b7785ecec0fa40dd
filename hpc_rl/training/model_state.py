"""One model's part of a checkpoint, written by torch.distributed.checkpoint and readable with any number of ranks.

.metadata, __0_0.distcp, ...   weights, optimizer and random state; each rank writes its shards
hf/                            model configuration and tokenizer, so that an export needs nothing else
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from hpc_rl.errors import UserError
from hpc_rl.training.distributed import World
from hpc_rl.training.model import PackedModel
from hpc_rl.training.sharding import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tensors = dict[str, torch.Tensor]
HF = "hf"


class UnreadableError(UserError):
    """A checkpoint that cannot be read; the message gives the first cause."""


def write(
    path: Path,
    model: PackedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase | None,
    world: World,
) -> None:
    """Write model, optimizer and random state into the folder `path`. Every rank calls this.

    Raises:
        OSError: the folder cannot be written.
    """
    if world.is_main:
        path.mkdir(parents=True, exist_ok=True)
    world.barrier()
    reshard(model)
    tensors = {**_model_tensors(model), **_optimizer_tensors(model, optimizer), **random_state(world)}
    try:
        _transfer(dcp.save, tensors, path, alone=world.size == 1)
    except CheckpointException as error:  # a BaseException, so no other handler would catch it
        raise OSError(f"{path} could not be written: {_first_cause(error)}") from error
    if world.is_main:
        model.hf.config.save_pretrained(path / HF)
        generation_config = getattr(model.hf, "generation_config", None)  # classifiers have none
        if generation_config is not None:
            generation_config.save_pretrained(path / HF)
        if tokenizer is not None:
            tokenizer.save_pretrained(path / HF)
    world.barrier()


def read(path: Path, model: PackedModel, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Read the folder `path` into model and optimizer, and restore the random state. Every rank calls this.

    Raises:
        UnreadableError: the folder cannot be read; every rank raises this.
    """
    reshard(model)
    tensors = {**_model_tensors(model), **_optimizer_tensors(model, optimizer)}
    known = _metadata(path).state_dict_metadata
    random = {name: value for name, value in random_state(world).items() if name in known}
    try:
        _transfer(dcp.load, {**tensors, **random}, path, alone=world.size == 1)
    except CheckpointException as error:
        raise UnreadableError(f"cannot be read: {_first_cause(error)}") from error
    set_random_state(random, world)


def read_weights(path: Path) -> Tensors:
    """Return all weights unsharded, in host memory, by their Hugging Face names; needs no process group.

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
    """
    problem = problem_of(path)
    if problem:
        raise UserError(f"{path} is not a usable checkpoint: {problem}")
    tensors: Tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _metadata(path).state_dict_metadata.items()
        if name.startswith(_MODEL) and hasattr(entry, "size")
    }
    try:
        _transfer(dcp.load, tensors, path, alone=True)
    except CheckpointException as error:
        raise UserError(f"{path} cannot be read: {_first_cause(error)}") from error
    return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}


def problem_of(path: Path) -> str | None:
    """Return why a folder is not complete, judged by its files and their sizes; None if it is complete."""
    try:
        stored = _metadata(path).storage_data or {}
    except (OSError, ValueError, TypeError, EOFError, UnpicklingError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    ends: dict[str, int] = {}
    for part in stored.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        file = path / name
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            return f"{name} has {size} of {end} bytes"
    return None


_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


def _model_tensors(model: PackedModel) -> Tensors:
    """Return weights and persistent buffers by their Hugging Face names, tied weights once."""
    tensors = {_MODEL + name: parameter.detach() for name, parameter in model.hf.named_parameters()}
    persistent = model.hf.state_dict().keys()
    tensors |= {_MODEL + name: buffer for name, buffer in model.hf.named_buffers() if name in persistent}
    return tensors


def _optimizer_tensors(model: PackedModel, optimizer: torch.optim.Optimizer) -> Tensors:
    names: dict[nn.Parameter, str] = {parameter: name for name, parameter in model.hf.named_parameters()}
    return {
        f"{_OPTIMIZER}{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def random_state(world: World) -> Tensors:
    """Return this rank's random state, as `set_random_state` restores it."""
    state = {f"{_RANDOM}{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"{_RANDOM}{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def set_random_state(state: Tensors, world: World) -> None:
    """Set the random state; a rank that did not exist when the checkpoint was written keeps its own."""
    for name, value in state.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(value, world.device)
        else:
            torch.set_rng_state(value)


def _transfer(action: Callable[..., Any], tensors: Tensors, path: Path, alone: bool) -> None:
    with warnings.catch_warnings():
        # torch warns about the missing process group even if no_dist=True declares it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        action(tensors, checkpoint_id=path, no_dist=alone)


def _metadata(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()


def _first_cause(error: CheckpointException) -> str:
    causes = [str(failure[0]) for failure in error.failures.values()]
    return causes[0].splitlines()[0] if causes and causes[0] else type(error).__name__
