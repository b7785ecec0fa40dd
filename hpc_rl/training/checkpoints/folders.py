"""The checkpoints of a run as folders: their names, which are complete, which are kept. Standard library only.

    checkpoints/
        step-00000010/
            trainer.json        Progress
            model/              one folder per trained model (model_state.py): `model`, or `actor` and `critic`
            checksums.json      of trainer.json and of each part's checksums.json
        step-00000020.tmp/      is being written, or a killed process left it
        step-00000030.aside/    of a step after the one that the run resumed from; never read again

A checkpoint gets its name when all of its parts are complete and on disk. Only then are older ones removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import RunError
from hpc_rl.formats.typed_json import object_of
from hpc_rl.system.disk import explained
from hpc_rl.system.files import read_regular, sync_folder, write_synced
from hpc_rl.training.checkpoints import checksums

MODEL, ACTOR, CRITIC = "model", "actor", "critic"
ASIDE = ".aside"
TRAINER = "trainer.json"
_PLAIN = (stat.S_IFREG, stat.S_IFDIR)
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come; trainer.json."""

    samples: int
    """Samples in the training data."""
    dtype: str
    """Type of the exported weights, such as bfloat16."""
    parts: tuple[str, ...] = (MODEL,)
    """Names of the trained models; the first one is exported."""
    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epoch of the next sample."""
    index: int = 0
    """Samples of this epoch that have been used."""
    total_tokens: int = 0
    """Tokens trained on so far."""
    world_size: int = 1
    wandb_id: str | None = None
    kl_coef: float | None = None
    """Weight of the KL penalty, if it adapts."""
    merge: bool = True
    """Whether adapters are exported merged into the weights of their model."""
    quantize: str | None = None
    """How the weights below the adapters are quantised: model.lora.quantize."""
    micro_tokens: dict[str, int] | None = None
    """What trainer.micro_tokens=auto is, and on what it depends (training/rows.py); None if it is a number, on CPUs,
    and in checkpoints of earlier versions."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint while it is being written."""
    final = step_folder(folder, step)
    return final.with_name(final.name + ".tmp")


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of everything that has the name of a finished checkpoint, newest first."""
    found = [(int(m[1]), path) for path in folder.glob("step-*") if (m := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def begin(folder: Path, step: int) -> Path:
    """Create the folder for the parts of a new checkpoint, and remove unfinished ones. Only one process calls this.

    Raises:
        RunError: the folder cannot be written.
    """
    partial = partial_folder(folder, step)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        _remove_unfinished(folder)
        partial.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"{partial} could not be written: {explained(error, partial)}") from error
    return partial


def discard(folder: Path, step: int) -> None:
    """Remove what was written of a checkpoint that failed, so that a full disk has space for logs again."""
    shutil.rmtree(partial_folder(folder, step), ignore_errors=True)


def name(folder: Path, progress: Progress) -> Path:
    """Name a checkpoint whose parts are all written.

    Raises:
        RunError: the folder cannot be written.
    """
    partial, final = partial_folder(folder, progress.step), step_folder(folder, progress.step)
    try:
        write_synced(partial / TRAINER, json.dumps(asdict(progress), indent=1))
        files = [TRAINER, *(f"{part}/{checksums.NAME}" for part in progress.parts)]
        checksums.write(partial, {file: checksums.of_file(partial / file) for file in files})
        if final.exists():
            _set_aside(final)
        partial.rename(final)
        sync_folder(folder)
    except OSError as error:
        raise RunError(f"{final} could not be written: {explained(error, final)}") from error
    return final


def remove_old(folder: Path, keep: int) -> None:
    """Remove what is older than the newest `keep` complete checkpoints. One that cannot be removed stays.

    Each is renamed first, so that a partly removed one is never read; `begin` removes what a killed process left.
    """
    kept = 0
    for step, path in numbered(folder):
        if kept >= keep:
            with _warned(path):
                shutil.rmtree(path.rename(partial_folder(folder, step)))
        elif problem_of(path) is None:
            kept += 1


def resume_after(folder: Path, step: int) -> None:
    """Prepare a folder for a run that resumes after a step: set later checkpoints aside, and remove unfinished ones.

    Later ones could not be used now. If one could be read again, it would replace the steps that are trained from here.

    Raises:
        RunError: the folder cannot be written.
    """
    _remove_unfinished(folder)
    try:
        later = [(path, _set_aside(path)) for number, path in numbered(folder) if number > step]
    except OSError as error:
        raise RunError(f"{folder} could not be written: {explained(error, folder)}") from error
    for path, aside in later:
        print(
            f"checkpoint {path.name} is now {aside.name}, because the run resumes after step {step}; "
            "hpc-rl clean --checkpoints lists it",
            flush=True,
        )


def _remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left. What cannot be removed stays, because nothing ever reads it."""
    for leftover in folder.glob("step-*.tmp"):
        with _warned(leftover):
            shutil.rmtree(leftover)


@contextmanager
def _warned(path: Path) -> Iterator[None]:
    """Warn if the block, which removes a folder, cannot."""
    try:
        yield
    except OSError as error:
        print(f"warning: {path} could not be removed: {error}", file=sys.stderr, flush=True)


def _set_aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{ASIDE}{count or ''}") for count in range(10**6))
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)


def read_progress(path: Path) -> Progress:
    """Read the trainer.json of a checkpoint.

    Raises:
        OSError, ValueError, TypeError, KeyError: it is missing or not valid.
    """
    fields = object_of(read_regular(path / TRAINER))
    if fields is None:
        raise ValueError(f"{TRAINER} is not a JSON object")
    return progress_of(fields)


def progress_of(fields: dict[str, Any]) -> Progress:
    """Return a progress that was JSON.

    Raises:
        ValueError, TypeError, KeyError: it is not valid. The names of parts are those of folders.
    """
    parts = tuple(fields["parts"])
    if not set(parts) <= {MODEL, ACTOR, CRITIC}:
        raise ValueError(f"{TRAINER} has parts that no run has")
    return Progress(**{**fields, "parts": parts})


def problem_of(path: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, judged by names and sizes of its files; None if it is one."""
    try:
        if planted := _of_another_user(path):
            return f"{planted.relative_to(path.parent)} belongs to another user"
        if odd := next((entry for entry in path.rglob("*") if stat.S_IFMT(entry.lstat().st_mode) not in _PLAIN), None):
            return f"{odd.relative_to(path.parent)} is neither a file nor a folder"
        parts = read_progress(path).parts
        own = checksums.read(path)
        if own is None and any((path / part / checksums.NAME).exists() for part in parts):
            return f"{checksums.NAME} is missing"
        if own and (problem := checksums.wrong_size(path, own) or checksums.wrong_contents(path, own, own)):
            return problem
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    problems = ((part, part_problem(path / part)) for part in parts)
    return next((f"{part}/{problem}" for part, problem in problems if problem), None)


def _of_another_user(path: Path) -> Path | None:
    """Return a file or folder of a checkpoint that the run's owner has not written: reading it could run a program.

    Files of this user and of root are trusted too, because a checkpoint may have been copied. A user namespace (an
    image) shows root like any other user, so that root's files count as those of another user there.
    """
    owner = path.parent.parent.stat().st_uid
    owners = ((entry, entry.lstat().st_uid) for entry in (path, *path.rglob("*")))
    return next((entry for entry, uid in owners if uid not in (owner, 0, os.geteuid())), None)


def part_problem(part: Path) -> str | None:
    """Return why a model's part is not complete, judged by names and sizes of its files; None if it is."""
    try:
        sums = checksums.read(part)
    except (OSError, ValueError) as error:
        return f"{checksums.NAME}: {error}"
    return None if sums is None else checksums.wrong_size(part, sums)


def damage_of(path: Path) -> str | None:
    """Read all files of a checkpoint. Return the first problem; None if it is complete and as it was written.

    A checkpoint without checksums, of an earlier version, is judged like `problem_of`.
    """
    if problem := problem_of(path):
        return problem
    for part in read_progress(path).parts:
        if problem := part_damage(path / part):
            return f"{part}/{problem}"
    return None


def part_damage(part: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Read one rank's share of the files of a part; return the first one that is not as it was written.

    The files are divided so that each is read once, and by the rank that wrote it if there are as many ranks as then.
    """
    sums = checksums.read(part) or {}
    return checksums.wrong_contents(part, sums, files_of_rank(sums, rank, ranks))


def files_of_rank(sums: Mapping[str, checksums.Checksum], rank: int, ranks: int) -> Sequence[str]:
    """Return one rank's share of files: `__3_0.distcp` was written by rank 3, all others by rank 0."""
    writers = {name: re.match(r"__(\d+)_", name) for name in sums}
    return [name for name, writer in writers.items() if int(writer[1] if writer else 0) % ranks == rank]


def has_checksums(path: Path) -> bool:
    """Return whether a checkpoint has checksums; those of earlier versions have none."""
    return (path / checksums.NAME).exists()
