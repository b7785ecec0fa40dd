"""One model's part of a checkpoint, written by torch.distributed.checkpoint and readable with any number of ranks.

.metadata, __0_0.distcp, ...   weights, optimizer and random state; each rank writes its shards
hf/                            model configuration and tokenizer, so that an export needs nothing else; of adapters also
                               adapter_config.json, and their export needs the model that they belong to
checksums.json                 of all these files; written last
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpc_rl.errors import AgreedError, RunError, UserError
from hpc_rl.formats import peft_folder
from hpc_rl.system.disk import explained
from hpc_rl.system.files import open_regular, read_json, sync
from hpc_rl.training.checkpoints import checksums, folders
from hpc_rl.training.checkpoints.checksums import Checksum, SummedStream
from hpc_rl.training.checkpoints.left_out import left_out_of
from hpc_rl.training.eight_bit import has_eight_bits
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.models.loading import trained_weights
from hpc_rl.training.parallel import plain_pickles
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tensors = dict[str, torch.Tensor]
HF = "hf"
_METADATA = ".metadata"
_DATA = re.compile(r"__\d+_\d+\.distcp")
"""Names of torch's files with tensors."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a checkpoint."""

    dtype: torch.dtype
    size: torch.Size


class UnreadableError(UserError):
    """A checkpoint that cannot be read; the message gives the first cause."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint has of one model."""

    tensors: Tensors
    model: PackedModel
    """Only its configuration is written, which training does not change."""
    tokenizer: PreTrainedTokenizerBase | None


def snapshot(
    model: PackedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase | None,
    world: World,
    copy: bool,
) -> Snapshot:
    """Collect model, optimizer and random state.

    Args:
        copy: copy all tensors to host memory, so that training can go on while they are written.
    """
    reshard(model)
    tensors = {**_model_tensors(model), **_optimizer_tensors(model, optimizer)}
    if copy:
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return Snapshot({**tensors, **random_state(world)}, model, tokenizer)


def write(path: Path, found: Snapshot, world: World) -> None:
    """Write a snapshot into the folder `path`. Every rank calls this, in any thread. checksums.json is written last.

    Raises:
        RunError: the folder cannot be written; every rank raises this.
    """
    world.together(lambda: _write_settings(path / HF, found) if world.is_main else None)
    writer = _Writer(path)
    try:
        with _without_torchs_checksums():
            _transfer(dcp.save, found.tensors, path, world.size == 1, process_group=world.group, storage_writer=writer)
    except CheckpointException as error:  # a BaseException, so no other handler would catch it
        raise RunError(f"{path} could not be written: {explained(_first_cause(error), path)}") from error
    sums = _gathered(writer.sums, world)
    world.together(lambda: _write_checksums(path, sums) if world.is_main else None)


def is_written(path: Path) -> bool:
    """Return whether a snapshot has been written completely."""
    return (path / checksums.NAME).exists()


def read(path: Path, model: PackedModel, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Read the folder `path` into model and optimizer, and restore the random state. Every rank calls this.

    Raises:
        UnreadableError: the folder cannot be read, or a file is not as it was written; every rank raises this.
        AgreedError: its adapters are not those of the model, or its moments are stored in another way.
    """
    try:
        world.together(lambda: refuse_damage(path, world.rank, world.size))
    except AgreedError as error:
        raise UnreadableError(str(error)) from error
    world.together(lambda: _refuse_other_adapters(path, model) if world.is_main else None)
    reshard(model)
    tensors = {**_model_tensors(model), **_optimizer_tensors(model, optimizer)}
    world.together(lambda: _refuse_other_moments(path, tensors) if world.is_main else None)
    known = _metadata(path).state_dict_metadata
    random = {name: value for name, value in random_state(world).items() if name in known}
    try:
        alone = world.size == 1
        _transfer(dcp.load, {**tensors, **random}, path, alone, process_group=world.group, storage_reader=_Reader(path))
    except CheckpointException as error:
        raise UnreadableError(f"cannot be read: {_first_cause(error)}") from error
    set_random_state(random, world)


def _refuse_other_adapters(path: Path, model: PackedModel) -> None:
    """Check that a checkpoint has the adapters of the model: other ones may have the same shapes.

    Raises:
        UserError: it has not.
    """
    file = path / HF / peft_folder.CONFIG
    if model.adapters is None:
        problem = "it has adapters (model.lora), and the run has none" if file.exists() else None
    elif not file.exists():
        problem = "it has no adapters, and the run has some (model.lora)"
    else:
        ours = model.adapters.peft_config(model.head_name())
        problem = peft_folder.changed_setting(read_json(file), ours, continued=model.adapters.source is not None)
    if problem:
        raise UserError(f"{path} does not fit the run: {problem}; set the option back, or choose another run directory")


def _refuse_other_moments(path: Path, tensors: Iterable[str]) -> None:
    """Check that a checkpoint has moments in 8 bits if the run has them, and otherwise none.

    Args:
        tensors: names of the run's tensors.

    Raises:
        UserError: it is not so.
    """
    theirs, ours = (
        "8bit" if has_eight_bits(name for name in names if name.startswith(_OPTIMIZER)) else "float32"
        for names in (_metadata(path).state_dict_metadata, tensors)
    )
    if theirs != ours:
        raise UserError(
            f"{path} does not fit the run: it was written with optim.moments={theirs}, and the run has {ours}; set the "
            "option back, or choose another run directory"
        )


def stored_weights(path: Path) -> dict[str, StoredWeight]:
    """Return type and size of all weights by their Hugging Face names.

    Raises:
        UserError: there is no checkpoint, or it is not complete.
    """
    if problem := _problem_of(path):
        raise UserError(f"{path} is not a usable checkpoint: {problem}")
    try:
        found = _metadata(path).state_dict_metadata
    except _BAD_METADATA as error:
        raise UserError(f"{path} is not a usable checkpoint: {error}") from error
    return {
        name.removeprefix(_MODEL): StoredWeight(entry.properties.dtype, entry.size)
        for name, entry in found.items()
        if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    }


def read_weights(path: Path, names: Sequence[str] | None = None, dtype: torch.dtype | None = None) -> Tensors:
    """Return weights unsharded, in host memory, by their Hugging Face names; needs no process group.

    Args:
        names: the weights to read. None: all of them.
        dtype: type of the result, for numbers with a fraction. None: the stored types.

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
    """
    stored = stored_weights(path)
    tensors: Tensors = {
        _MODEL + name: torch.empty(
            stored[name].size, dtype=dtype if dtype and stored[name].dtype.is_floating_point else stored[name].dtype
        )
        for name in (stored if names is None else names)
    }
    try:
        _transfer(dcp.load, tensors, path, alone=True, storage_reader=_Reader(path))
    except CheckpointException as error:
        raise UserError(f"{path} cannot be read: {_first_cause(error)}") from error
    return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}


def refuse_damage(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Read one rank's share of the files, and check that they are as they were written.

    Raises:
        UnreadableError: one is not.
    """
    try:
        problem = _problem_of(path) or folders.part_damage(path, rank, ranks)
    except (OSError, ValueError) as error:  # a stale handle, no permission, checksums that are not JSON
        raise UnreadableError(f"{path.name}/{error}") from error
    if problem:
        raise UnreadableError(f"{path.name}/{problem}")
    try:
        _metadata(path)  # every rank reads this file
    except _BAD_METADATA as error:
        raise UnreadableError(f"{path.name}/{error}") from error


def _problem_of(path: Path) -> str | None:
    """Return why a folder is not complete, judged by its files and their sizes; None if it is complete."""
    if (problem := folders.part_problem(path)) or is_written(path):
        return problem
    # A checkpoint of an earlier version, without checksums.
    try:
        stored = _metadata(path).storage_data or {}
    except _BAD_METADATA as error:
        return f"{type(error).__name__}: {error}"
    ends: dict[str, int] = {f"{HF}/config.json": 1}
    for part in stored.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        file = path / name
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            return f"{name} has {size} of {end} bytes"
    return None


_BAD_METADATA = (OSError, ValueError)
_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random."


def _model_tensors(model: PackedModel) -> Tensors:
    return {_MODEL + name: tensor for name, tensor in trained_weights(model).items()}


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
    if world.on_accelerator:
        kind = world.device.type
        state[f"{_RANDOM}{world.rank}.{kind}"] = torch.get_device_module(kind).get_rng_state(world.device)
    return state


def set_random_state(state: Tensors, world: World) -> None:
    """Set the random state; a rank that did not exist when the checkpoint was written keeps its own."""
    for name, value in state.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(value)
        else:
            torch.get_device_module(world.device.type).set_rng_state(value, world.device)


class _SummedFiles(FileSystem):
    """Writes files and computes their checksums."""

    def __init__(self) -> None:
        self.sums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = SummedStream(cast(IO[bytes], stream))
            yield summed
        self.sums[Path(path).name.removesuffix(".tmp")] = summed.checksum  # `.metadata` is renamed later


class _Writer(dcp.FileSystemWriter):
    """Writes this rank's tensors to one file, and computes its checksum."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _SummedFiles()

    @property
    def sums(self) -> dict[str, Checksum]:
        """Checksums of what this rank has written."""
        return self.fs.sums


@contextmanager
def _without_torchs_checksums() -> Iterator[None]:
    """Leave out the checksums that torch.save computes, which torch.load does not verify."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _gathered(own: dict[str, Checksum], world: World) -> dict[str, Checksum]:
    """Return the checksums of all ranks, exchanged as text."""
    text = json.dumps([[name, one.size, one.crc32] for name, one in own.items()]).encode()
    everyone = world.gather_varied(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    rows = [row for found in everyone for row in json.loads(found.numpy().tobytes())]
    return {name: Checksum(size, crc32) for name, size, crc32 in rows}


def _write_checksums(path: Path, sums: dict[str, Checksum]) -> None:
    try:
        settings = {f"{HF}/{file.name}": checksums.of_file(file) for file in sorted((path / HF).iterdir())}
        checksums.write(path, {**sums, **settings})
    except OSError as error:
        raise RunError(f"{path} could not be written: {explained(error, path)}") from error


def _write_settings(folder: Path, found: Snapshot) -> None:
    hf = found.model.hf
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hf.config.architectures = [type(hf).__name__]  # an export finds its class by this
        hf.config.save_pretrained(folder)
        generation_config = getattr(hf, "generation_config", None)  # classifiers have none
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(folder)
        if (left := left_out_of(hf)) is not None:
            left.write(folder)
        if (adapters := found.model.adapters) is not None:
            (folder / peft_folder.CONFIG).write_text(
                json.dumps(adapters.peft_config(found.model.head_name()), indent=2) + "\n"
            )
        for file in folder.iterdir():
            sync(file)
    except OSError as error:
        raise RunError(f"{folder} could not be written: {explained(error, folder)}") from error


def _transfer(action: Callable[..., Any], tensors: Tensors, path: Path, alone: bool, **options: Any) -> None:
    with warnings.catch_warnings():
        # torch warns about the missing process group even if no_dist=True declares it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        action(tensors, checkpoint_id=path, no_dist=alone, **options)


class _Reader(dcp.FileSystemReader):
    """Reads a checkpoint of which the description has been read before. It has an entry for each part of a tensor."""

    def read_metadata(self, *_arguments: Any, **_named: Any) -> Metadata:
        return _metadata(Path(self.path))


def _metadata(path: Path) -> Metadata:
    stat = (path / _METADATA).stat()
    return _read_metadata(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read_metadata(path: Path, _mtime_ns: int, _size: int) -> Metadata:
    sums = checksums.read(path) or {}
    if problem := checksums.wrong_contents(path, sums, sums.keys() & {_METADATA}):
        raise ValueError(problem)
    with open_regular(path / _METADATA) as file:
        try:
            found = plain_pickles.load(file)
        except UnpicklingError as error:
            raise ValueError(f"{_METADATA} cannot be read: {error}") from error
    if not isinstance(found, Metadata) or not _describes_tensors(found):
        raise ValueError(f"{_METADATA} does not describe tensors in files beside it")
    return found


def _describes_tensors(found: Metadata) -> bool:
    """Return whether a description has tensors only, in files of the same folder. torch unpickles other values, with
    whatever program is in them, and opens any path."""
    places = found.storage_data
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(places, dict):
        return False
    return all(isinstance(entry, TensorStorageMetadata) for entry in found.state_dict_metadata.values()) and all(
        isinstance(place, _StorageInfo)
        and isinstance(place.relative_path, str)
        and _DATA.fullmatch(place.relative_path) is not None
        and isinstance(place.offset, int)
        and isinstance(place.length, int)
        for place in places.values()
    )


def _first_cause(error: CheckpointException) -> str:
    causes = [str(failure[0]) for failure in error.failures.values()]
    return causes[0].splitlines()[0] if causes and causes[0] else type(error).__name__
