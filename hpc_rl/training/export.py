"""Export a checkpoint as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.training import checkpoint, model_state
from hpc_rl.training.model import empty_model


def export(source: Path, out: Path, dtype: str | None = None, replace: bool = False) -> Path:
    """Write weights (safetensors), configuration and tokenizer of a checkpoint into the folder `out`.

    This needs only the checkpoint: no process group, no GPU, and not the model that training started from. The files
    get the permissions that the umask gives to new files.

    Args:
        source: a run directory (its newest checkpoint is exported) or the folder of one checkpoint.
        out: a folder that does not exist yet or is empty.
        dtype: "float32", "bfloat16", ...; None for the type of the training.
        replace: replace the contents of `out`, after the new folder is complete.

    Returns:
        the folder of the checkpoint.

    Raises:
        UserError: there is no usable checkpoint, or `out` is not empty.
        RunError: `out` cannot be written.
    """
    path = checkpoint.find(source, RunDir(source).checkpoints)
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: choose another folder")
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    progress = checkpoint.read_progress(path)
    weights = model_state.read_weights(path / progress.parts[0])
    target = getattr(torch, dtype or progress.dtype)
    weights = {name: w.to(target) if w.is_floating_point() else w for name, w in weights.items()}
    files = path / progress.parts[0] / model_state.HF
    hf = empty_model(AutoConfig.from_pretrained(files), target)
    hf.load_state_dict(weights, strict=False, assign=True)
    hf.tie_weights()
    missing = [name for name, parameter in hf.named_parameters() if parameter.is_meta]
    if missing:
        raise UserError(f"{path} has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    if (files / "generation_config.json").exists():
        hf.generation_config = GenerationConfig.from_pretrained(files)
    partial = out.with_name(f".{out.name}.tmp{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        hf.save_pretrained(partial)
        AutoTokenizer.from_pretrained(files).save_pretrained(partial)
        _follow_umask(partial)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as error:
        raise RunError(f"cannot write the model to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _follow_umask(folder: Path) -> None:
    """Give files the permissions that new files have here; safetensors writes 0600, which a group cannot read."""
    probe = folder / ".probe"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(stat.S_IMODE(mode))
