"""Export a checkpoint as a Hugging Face folder that transformers and vLLM load.

Any number of processes write at the same time, each its own files, one tensor at a time: with N processes that are
called `rank` 0 to N - 1,

    with new_folder(source, out) as (checkpoint, partial):     # one process
        write_weights(checkpoint, partial, dtype, rank, N)     # each process
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.formats import peft_folder
from hpc_rl.formats.model_kind import is_classifier
from hpc_rl.run_dir import RunDir
from hpc_rl.system.disk import explained
from hpc_rl.system.files import refuse_occupied
from hpc_rl.system.ownership import own_folders
from hpc_rl.system.scratch import marked_in_use, remove_abandoned
from hpc_rl.training.checkpoints import adapter_weights, checkpoint, folders, model_state
from hpc_rl.training.checkpoints.adapter_weights import Weights
from hpc_rl.training.checkpoints.left_out import read_left_out, write_complete
from hpc_rl.training.checkpoints.model_state import UnreadableError
from hpc_rl.training.models import safetensors_files
from hpc_rl.training.models.loading import weights_of
from hpc_rl.training.models.pretrained import from_pretrained, parameters_on_meta
from hpc_rl.training.models.stored_form import changes_weights
from hpc_rl.training.parallel.distributed import ONE_PROCESS, World
from hpc_rl.training.wrappers import language_class, wrapper_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE_BYTES = 2 * 10**9
"""Largest size of a file with several weights. Files are the unit of parallel writing."""


def export(
    source: Path,
    out: Path,
    dtype: str | None = None,
    merge: bool | None = None,
    replace: bool = False,
    world: World = ONE_PROCESS,
    base: str | None = None,
) -> Path:
    """Write weights (safetensors), configuration and tokenizer of a checkpoint into the folder `out`.

    This needs no GPU. It needs the model that training started from only if adapters are merged into it, or if its
    files have weights that were not trained (left_out.py). Every rank of `world` calls it and writes a part. The files
    get the permissions that the umask gives to new files.

    Args:
        source: a run directory (its newest checkpoint is exported) or the folder of one checkpoint.
        out: a folder that does not exist yet or is empty.
        dtype: "float32", "bfloat16", ...; None for the run's trainer.export_dtype, and of adapters for their own.
        merge: whether adapters are merged into the weights of their model; otherwise a folder in the format of peft is
            written. None for the run's model.lora.merge.
        replace: replace the contents of `out`, after the new folder is complete.
        base: the folder where the model is now that training started from; None for where it was.

    Returns:
        the folder of the checkpoint.

    Raises:
        UserError: there is no usable checkpoint, or `out` is not empty.
        RunError: `out` cannot be written.
    """
    with ExitStack() as stack:
        folders = world.together(
            lambda: stack.enter_context(new_folder(source, out, dtype, merge, replace, base)) if world.is_main else None
        )
        path, partial = map(Path, world.broadcast(folders and [str(folder) for folder in folders]))
        world.together(lambda: write_weights(path, partial, dtype, world.rank, world.size, merge, base))
        world.together(stack.close)
    return path


def is_exported(path: Path, out: Path) -> bool:
    """Return whether the model in the folder `out` is at least as new as the checkpoint `path`. If an export fails, the
    model of an earlier step is still there."""
    saved = (path / folders.TRAINER).stat().st_mtime_ns
    written = [file.stat().st_mtime_ns for file in out.glob("*") if file.is_file()]
    return min(written, default=0) >= saved


def export_dtype(model: ModelConfig, trainer: TrainingConfig) -> str:
    """Return the type of the exported weights."""
    return trainer.export_dtype or ("bfloat16" if trainer.uses_gpus else model.dtype)


@contextmanager
def new_folder(
    source: Path,
    out: Path,
    dtype: str | None = None,
    merge: bool | None = None,
    replace: bool = False,
    base: str | None = None,
) -> Iterator[tuple[Path, Path]]:
    """Yield a checkpoint and a folder in which only the weights are missing; name the folder `out` at the end.

    The arguments and errors are those of `export`. What killed exports of `out` left is removed.
    """
    path = checkpoint.find(source, RunDir(source).checkpoints)
    if not replace:
        refuse_occupied(out)
    partial = out.with_name(f".{out.name}.tmp{os.getpid()}")
    try:
        with _explained(out):
            remove_abandoned(own_folders(out.parent, f".{glob.escape(out.name)}.tmp*"))
            partial.mkdir(parents=True)
        with marked_in_use(partial):
            model_state.stored_weights(_part(path))  # before the other files of a checkpoint that is no checkpoint
            with _explained(out):
                _write_settings(path, partial, dtype, merge, base)
            yield path, partial
        with _explained(out):
            _follow_umask(partial)
            if out.exists():
                shutil.rmtree(out)
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_weights(
    path: Path,
    folder: Path,
    dtype: str | None,
    rank: int,
    ranks: int,
    merge: bool | None = None,
    base: str | None = None,
) -> None:
    """Write one rank's files of the weights of a checkpoint.

    Args:
        path: the checkpoint.
        merge, base: see `export`.

    Raises:
        UserError: the checkpoint cannot be read.
        RunError: the folder cannot be written.
    """
    part, target = _part(path), _type(path, dtype)
    try:
        model_state.refuse_damage(part, rank, ranks)
    except UnreadableError as error:
        raise UserError(f"checkpoint {path} cannot be exported: {error}; export another step of the run") from error
    if _exports_adapters(path, merge):
        if rank == 0:
            with _explained(folder):
                adapter_weights.write_peft_weights(part, folder, dtype)
        return
    hf, left = _empty(part, target), read_left_out(part / model_state.HF, base)
    changes = changes_weights(hf)  # before the files of adapters' model are read, which may alter it
    if left is None and changes and rank != 0:
        return
    weights = adapter_weights.open_weights(part, hf, folders.read_progress(path).quantize is not None, base)
    stored = weights.stored
    names = [name for name in weights_of(hf) if name not in (hf._keys_to_ignore_on_save or ())]
    missing = [name for name in names if name not in stored]
    if missing:
        raise UserError(f"{path} has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    with _explained(folder):
        if left is not None:
            write_complete(left, hf, names, weights, folder, target, _FILE_BYTES, (rank, ranks))
            return
        if changes:
            _write_whole(hf, weights, target, folder)
            return
        dtypes = {name: target if stored[name].dtype.is_floating_point else stored[name].dtype for name in names}
        sizes = {name: stored[name].size.numel() * dtypes[name].itemsize for name in names}
        groups = safetensors_files.split(sizes, _FILE_BYTES)
        files, index = safetensors_files.index(groups, sizes)
        if rank == 0 and index is not None:
            (folder / "model.safetensors.index.json").write_text(index)
        for file, group in list(zip(files, groups, strict=True))[rank::ranks]:
            shapes = {name: stored[name].size for name in group}
            safetensors_files.write(folder / file, shapes, dtypes, functools.partial(weights.read, dtype=target))


def _exports_adapters(path: Path, merge: bool | None) -> bool:
    """Return whether a checkpoint is exported as a folder with its adapters."""
    merges = folders.read_progress(path).merge if merge is None else merge
    return not merges and adapter_weights.has_adapters(_part(path))


def _write_settings(path: Path, folder: Path, dtype: str | None, merge: bool | None, base: str | None) -> None:
    """Write configuration, generation settings, tokenizer, and a model's own code. Adapters have a configuration of
    their own, and the tokenizer."""
    from transformers import AutoTokenizer, GenerationConfig

    part = _part(path)
    if _exports_adapters(path, merge):
        for name in (peft_folder.CONFIG, "generation_config.json"):
            if (part / model_state.HF / name).exists():
                shutil.copy(part / model_state.HF / name, folder)
        _read(AutoTokenizer, part).save_pretrained(folder)
        return
    hf = _empty(part, _type(path, dtype))
    if (part / model_state.HF / "generation_config.json").exists():
        hf.generation_config = GenerationConfig.from_pretrained(part / model_state.HF)
    tokenizer = _read(AutoTokenizer, part)
    if is_classifier(hf.config.architectures):
        if hf.config.pad_token_id is None:
            hf.config.pad_token_id = tokenizer.pad_token_id  # transformers finds the last token of a padded text by it
        hf.config.problem_type = "regression"  # otherwise vLLM returns a sigmoid or a softmax of the scores
    hf.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors*"):  # without a weight
        file.unlink()
    tokenizer.save_pretrained(folder)
    if (left := read_left_out(part / model_state.HF, base)) is not None:
        left.files()  # before anything is written
        left.copy_settings(folder)


def _write_whole(hf: PreTrainedModel, weights: Weights, dtype: torch.dtype, folder: Path) -> None:
    """Write all weights in one process, for models whose weights transformers renames or splits in files."""
    hf.load_state_dict({name: weights.read(name, dtype) for name in weights.stored}, strict=False, assign=True)
    hf.tie_weights()
    hf.save_pretrained(folder, max_shard_size=_FILE_BYTES)


def _part(path: Path) -> Path:
    """Return the folder of the model that is exported: the first part of a checkpoint."""
    parts = folders.read_progress(path).parts
    if not parts:
        raise UserError(f"{path} has no model: {folders.TRAINER} names no part")
    return path / parts[0]


def _type(path: Path, dtype: str | None) -> torch.dtype:
    name = dtype or folders.read_progress(path).dtype
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"{path} names {name!r} as the type of its weights, which is none: give --dtype")
    return found


def _empty(part: Path, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = _read(AutoConfig, part)
    auto = AutoModelForSequenceClassification if is_classifier(config.architectures) else AutoModelForCausalLM
    if (wrapper := wrapper_class(config)) is not None:
        auto = language_class(wrapper)
    with parameters_on_meta():
        hf: PreTrainedModel = auto.from_config(config, dtype=dtype)
    return hf


def _read(auto: Any, part: Path) -> Any:
    """Read configuration or tokenizer of a checkpoint, without running code that it contains.

    Raises:
        UserError: it cannot be read.
    """
    what = "tokenizer" if "Tokenizer" in auto.__name__ else "configuration"
    return from_pretrained(auto, str(part / model_state.HF), what, "checkpoint", trust_remote_code=False)


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write the model to {out}: {explained(error, out)}") from error


def _follow_umask(folder: Path) -> None:
    """Give files the permissions that new files have here; safetensors writes 0600, which a group cannot read."""
    probe = folder / ".probe"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(stat.S_IMODE(mode))
