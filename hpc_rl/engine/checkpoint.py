"""Checkpoints by torch.distributed.checkpoint: everything that a run needs to go on, at any number of ranks.

    checkpoints/step-00000010/
        .metadata, __0_0.distcp, ...   weights, optimizer and random state, each rank its part
        trainer.json                   Progress
        hf/                            model configuration and tokenizer, so that an export needs nothing else

A checkpoint is written under `step-00000010.tmp` and renamed once every rank has written its part.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from hpc_rl.engine.distributed import World
from hpc_rl.engine.errors import AgreedError
from hpc_rl.engine.model import CausalLM
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TensorDict = dict[str, torch.Tensor]
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """How far a run is; trainer.json."""

    samples: int
    """Samples in the training data."""
    dtype: str
    """Type of the weights."""
    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epoch of the next sample."""
    index: int = 0
    """Samples of this epoch that are used already."""
    total_tokens: int = 0
    """Tokens trained on so far."""
    world_size: int = 1
    wandb_id: str | None = None


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(
    folder: Path,
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    world: World,
    keep: int,
) -> Path:
    """Write a checkpoint and remove all but the newest `keep`. Every rank calls this."""
    final = step_folder(folder, progress.step)
    partial = final.with_name(final.name + ".tmp")
    if world.is_main:
        for leftover in folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    world.barrier()
    tensors = {
        **_model_tensors(model),
        **_optimizer_tensors(model, optimizer),
        **_random_state(world),
    }
    try:
        _transfer(dcp.save, tensors, partial, alone=world.size == 1)
    except CheckpointException as error:  # no Exception, so nobody else would catch it
        raise OSError(f"checkpoint {final} could not be written: {_first_cause(error)}") from error
    if world.is_main:
        model.hf.config.save_pretrained(partial / "hf")
        if model.hf.generation_config is not None:
            model.hf.generation_config.save_pretrained(partial / "hf")
        tokenizer.save_pretrained(partial / "hf")
        (partial / "trainer.json").write_text(json.dumps(asdict(progress), indent=1))
        if final.exists():  # an unreadable one of the same step, which the run went back from
            shutil.rmtree(final)
        partial.rename(final)
        for _, old in _numbered(folder)[keep:]:
            shutil.rmtree(old)
    world.barrier()
    return final


def load_latest(folder: Path, model: CausalLM, optimizer: torch.optim.Optimizer, world: World) -> Progress | None:
    """Read the newest usable checkpoint into model and optimizer; None where there is none. Every rank calls this.

    A checkpoint that cannot be used is passed over with one line on stderr.

    Raises:
        AgreedError: there are checkpoints, but none can be used, so starting from scratch would lose them.
    """
    candidates = world.broadcast_object(list(_usable(folder)) if world.is_main else None)
    for path, progress in candidates:
        tensors = {**_model_tensors(model), **_optimizer_tensors(model, optimizer)}
        known = _metadata(path).state_dict_metadata
        random = {name: value for name, value in _random_state(world).items() if name in known}
        try:
            _transfer(dcp.load, {**tensors, **random}, path, alone=world.size == 1)
        except CheckpointException as error:
            if world.is_main:
                _warn(path, f"cannot be read: {_first_cause(error)}")
            continue
        _set_random_state(random, world)
        return progress
    if world.broadcast_object(bool(_numbered(folder)) if world.is_main else None):
        raise AgreedError(
            f"no checkpoint in {folder} can be read; to start from the beginning, remove that folder or take another "
            "run directory"
        )
    return None


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """The newest complete checkpoint of a run, without reading its tensors."""
    return next(_usable(folder), None)


def read_weights(path: Path) -> TensorDict:
    """All weights of one checkpoint, whole, in host memory; without a process group.

    Raises:
        UserError: no checkpoint there, or one that cannot be read.
    """
    problem = _problem(path)
    if problem:
        raise UserError(f"{path} is no usable checkpoint: {problem}")
    tensors: TensorDict = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _metadata(path).state_dict_metadata.items()
        if name.startswith(_MODEL) and hasattr(entry, "size")
    }
    try:
        _transfer(dcp.load, tensors, path, alone=True)
    except CheckpointException as error:
        raise UserError(f"{path} cannot be read: {_first_cause(error)}") from error
    return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}


def read_progress(path: Path) -> Progress:
    return Progress(**json.loads((path / "trainer.json").read_text()))


_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


def _model_tensors(model: CausalLM) -> TensorDict:
    """Weights and persistent buffers under their Hugging Face names; tied weights once."""
    tensors = {_MODEL + name: parameter.detach() for name, parameter in model.hf.named_parameters()}
    persistent = model.hf.state_dict().keys()
    tensors |= {_MODEL + name: buffer for name, buffer in model.hf.named_buffers() if name in persistent}
    return tensors


def _optimizer_tensors(model: CausalLM, optimizer: torch.optim.Optimizer) -> TensorDict:
    names: dict[nn.Parameter, str] = {parameter: name for name, parameter in model.hf.named_parameters()}
    return {
        f"{_OPTIMIZER}{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _random_state(world: World) -> TensorDict:
    state = {f"{_RANDOM}{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"{_RANDOM}{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def _set_random_state(state: TensorDict, world: World) -> None:
    """A rank that did not exist when the checkpoint was written keeps its own."""
    for name, value in state.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(value, world.device)
        else:
            torch.set_rng_state(value)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that is named like a finished checkpoint, newest first."""
    found = [(int(m[1]), path) for path in folder.glob("step-*") if (m := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def _usable(folder: Path) -> Iterator[tuple[Path, Progress]]:
    """Complete checkpoints, newest first; warns of others."""
    for _, path in _numbered(folder):
        problem = _problem(path)
        if problem:
            _warn(path, problem)
        else:
            yield path, read_progress(path)


def _problem(path: Path) -> str | None:
    """Why a folder is no complete checkpoint, told from its files' presence and sizes."""
    try:
        read_progress(path)
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


def _transfer(action: Callable[..., Any], tensors: TensorDict, path: Path, alone: bool) -> None:
    with warnings.catch_warnings():
        # It warns of having no process group even when told that there is none.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        action(tensors, checkpoint_id=path, no_dist=alone)


def _metadata(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()


def _first_cause(error: CheckpointException) -> str:
    causes = [str(failure[0]) for failure in error.failures.values()]
    return causes[0].splitlines()[0] if causes and causes[0] else type(error).__name__


def _warn(path: Path, problem: str) -> None:
    print(f"warning: checkpoint {path} is passed over: {problem}", file=sys.stderr, flush=True)
