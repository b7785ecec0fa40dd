"""What the files of a model have beside the weights that are trained: a wrapper's parts for images and sound, and
layers that predict several tokens.

A checkpoint names them, and an export copies them from these files, so that it is the complete model in the same
layout: each weight has the name that it has there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpc_rl.errors import UserError
from hpc_rl.formats.hub import check_hub
from hpc_rl.system.files import read_json
from hpc_rl.training.models import safetensors_files
from hpc_rl.training.models.pretrained import model_file, weight_files
from hpc_rl.training.models.safetensors_files import Stored, contents
from hpc_rl.training.models.stored_form import StoredForm, follow_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hpc_rl.training.checkpoints.adapter_weights import Weights

_NAME = "left_out.json"
_COPIED = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files with which transformers and vLLM read images and sound."""


@dataclass(frozen=True)
class LeftOut:
    """The weights that are not trained, and where they are."""

    base: str
    """The model that training started from: a folder, or a name on the hub."""
    commit: str | None
    """Its commit on the hub."""
    names: tuple[str, ...]
    """Names of the weights in its files."""

    def write(self, folder: Path) -> None:
        """Write this into the folder with the settings of a checkpoint."""
        (folder / _NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def files(self) -> dict[str, Stored]:
        """Return where the weights of the base are stored, by name.

        Raises:
            UserError: they are not there, or they are those of another model.
        """
        if not Path(self.base).is_dir():
            if Path(self.base).is_absolute():
                raise self._error("there is no such folder")
            check_hub(self.base)
        try:
            files = weight_files(self.base, self.commit) or ()
            found = {name: stored for file in files for name, stored in contents(file).items()}
        except (OSError, ValueError) as error:
            raise self._error(str(error)) from error
        if missing := [name for name in self.names if name not in found]:
            raise self._error(f"it has no {missing[0]}" if found else "it has no safetensors files")
        return found

    def copy_settings(self, folder: Path) -> None:
        """Copy the files with which images and sound are read."""
        for name in _COPIED:
            if (file := model_file(self.base, name, self.commit)) is not None:
                shutil.copyfile(file, folder / name)

    def _error(self, problem: str) -> UserError:
        where = f"{self.base} (commit {self.commit})" if self.commit else self.base
        return UserError(
            f"an export copies {len(self.names)} weights that were not trained, such as {self.names[0]}, from the "
            f"model that training started from, and {where} cannot be used: {problem}; make this model available "
            "there, or name the folder where it is now with hpc-rl export --base"
        )


def left_out_of(hf: PreTrainedModel) -> LeftOut | None:
    """Return what was left out when a module was loaded; None for nothing."""
    names = getattr(hf, "left_out", ())
    base = str(hf.config.name_or_path)
    base = str(Path(base).absolute()) if Path(base).is_dir() else base
    return LeftOut(base, getattr(hf.config, "_commit_hash", None), names) if names else None


def read_left_out(folder: Path, base: str | None = None) -> LeftOut | None:
    """Return what a checkpoint names; None if an export needs nothing else.

    Args:
        folder: with the settings of the checkpoint.
        base: the folder where the model is now; None for where it was.
    """
    if not (folder / _NAME).exists():
        return None
    found = read_json(folder / _NAME)
    commit = None if base else found["commit"]
    return LeftOut(base or str(found["base"]), commit, tuple(found["names"]))


def write_complete(
    left: LeftOut,
    hf: PreTrainedModel,
    names: Sequence[str],
    weights: Weights,
    folder: Path,
    target: torch.dtype,
    limit: int,
    share: tuple[int, int],
) -> None:
    """Write one rank's files of a model: trained weights in the type `target`, and the others as they are.

    Args:
        hf: the module without memory.
        names: of its weights that files have.
        weights: the trained weights.
        limit: largest size of a file with several weights.
        share: (rank, ranks).
    """
    base = left.files()
    follow_files(hf, base)
    form = StoredForm(hf)
    parts: dict[str, dict[str, torch.Size]] = {}
    types: dict[str, torch.dtype] = {}
    for name in names:
        dtype = weights.stored[name].dtype
        empty = torch.empty(
            weights.stored[name].size, dtype=target if dtype.is_floating_point else dtype, device="meta"
        )
        parts[name] = {stored: part.shape for stored, part in form.parts(name, empty)}
        types |= dict.fromkeys(parts[name], empty.dtype)
    if other := [name for name, shape in _all(parts.values()).items() if name not in base or base[name].shape != shape]:
        raise UserError(
            f"{left.base} has no {other[0]} of the shape that was trained: it is another model by now; name the folder "
            "of the model that training started from with hpc-rl export --base"
        )
    for name in left.names:
        parts[name] = {name: base[name].shape}
        types[name] = base[name].dtype
    sizes = {name: shape.numel() * types[name].itemsize for name, shape in _all(parts.values()).items()}
    groups = safetensors_files.split({unit: sum(sizes[name] for name in of) for unit, of in parts.items()}, limit)
    shapes = [_all(parts[unit] for unit in group) for group in groups]
    files, index = safetensors_files.index([list(each) for each in shapes], sizes)
    rank, ranks = share
    if rank == 0 and index is not None:
        (folder / "model.safetensors.index.json").write_text(index)
    unit_of = {name: unit for unit, of in parts.items() for name in of}
    left_names = frozenset(left.names)
    kept: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name in left_names:
            return base[name].whole()
        if name not in kept:  # the parts of a weight follow one another
            kept.clear()
            kept.update(form.parts(unit_of[name], weights.read(unit_of[name], target)))
        return kept.pop(name)

    for file, group in list(zip(files, shapes, strict=True))[rank::ranks]:
        safetensors_files.write(folder / file, group, types, read)


def _all(parts: Iterable[dict[str, torch.Size]]) -> dict[str, torch.Size]:
    return {name: shape for each in parts for name, shape in each.items()}
