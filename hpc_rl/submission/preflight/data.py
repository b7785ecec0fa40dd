"""Checks of the data: each file's rows are read as the job will read them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.data.reading.formats import CannotCheck, check_data_folder, is_file, unknown_format
from hpc_rl.data.reading.row_checks import (
    AnyData,
    check_batch_size,
    check_file,
    refuse_local,
    refuse_offline,
    streams_local,
)
from hpc_rl.data.reading.shares import describe, shares, whole_batches
from hpc_rl.errors import UserError
from hpc_rl.submission.hub import HubCache
from hpc_rl.submission.preflight.hub_names import look_up, not_cached, refuse_mistyped
from hpc_rl.submission.series.after import is_coming

_OTHER_FORMATS = (".arrow", ".gz", ".txt", ".xlsx", ".xml", ".yaml", ".zip", ".zst")
_DATA_SET = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
MAX_ROWS = 10_000
"""Rows of a data file that are checked before the job is queued; the job itself checks all of them."""


def check_train_data(
    data: FinetuneDataConfig | PromptDataConfig, coming: frozenset[Path], cache: HubCache
) -> str | None:
    """Check all training files, and that they fill at least one batch.

    Args:
        coming: what an earlier job writes, which may not exist yet.

    Returns:
        What could not be checked and, if the files have weights, how often their rows are used, a line each.

    Raises:
        UserError: all problems, a line each.
    """
    if isinstance(data, FinetuneDataConfig) and data.stream_rows is not None:
        return _check_stream(data.train_files, coming, cache)
    problems: list[str] = []
    notes: list[str] = []
    counts: list[int | None] = []
    for file in data.train_files:
        try:
            count, note = _read("data.train_files", file, data, coming, cache)
        except UserError as error:
            problems.append(str(error))
        else:
            counts.append(count)
            notes += [note] if note else []
    if problems:
        raise UserError("\n".join(problems))
    read = [count for count in counts if count is not None and count < MAX_ROWS]
    if len(read) == len(counts):  # otherwise there may be more rows than were read
        check_batch_size(sum(read), data.train_batch_size)
        notes += _share_notes(data.train_files, read, data) if isinstance(data.train_files, dict) else []
    return "\n".join(notes) or None


def _check_stream(files: Iterable[str], coming: frozenset[Path], cache: HubCache) -> str | None:
    """Check data that is read while the run trains."""
    (name,) = files
    if is_coming(name, coming):
        raise UserError(f"data.train_files: {streams_local(name)}")
    try:
        refuse_local(name)
        _check_form(name)
        refuse_offline(name, cache.data_offline)
        return _look_up(name, cache)
    except UserError as error:
        raise UserError(f"data.train_files: {error}") from error


def _share_notes(weights: dict[str, float], rows: list[int], data: FinetuneDataConfig | PromptDataConfig) -> list[str]:
    """Describe the shares of files if all rows are used. The job leaves some out, such as those that are too long."""
    epoch = sum(rows)
    if isinstance(data, PromptDataConfig):
        epoch = whole_batches(epoch, data.train_batch_size)
    try:
        counts = shares(weights, epoch)
    except UserError as error:
        raise UserError(f"data.train_files: {error}") from error
    return [f"data.train_files: if the job leaves out no row, an epoch has {describe(weights, rows, counts)}"]


def check_val_data(key: str, file: str, data: AnyData, coming: frozenset[Path], cache: HubCache) -> str | None:
    """Check one file of validation data, or of prompts.

    Args:
        key: the option that names the file.
        coming: what an earlier job writes, which may not exist yet.

    Returns:
        Why it could not be checked, if so.

    Raises:
        UserError: the file is missing, or one of its rows is invalid.
    """
    return _read(key, file, data, coming, cache)[1]


def _read(
    key: str, file: str, data: AnyData, coming: frozenset[Path], cache: HubCache
) -> tuple[int | None, str | None]:
    """Return the number of rows that were checked, None if none could be, and why."""
    if is_coming(file, coming):
        return None, None
    path = Path(file)
    try:
        if path.is_dir():
            check_data_folder(path)
            return None, f"data folder {file} is read when the job starts"
        if not is_file(file):
            _check_form(file)
            return None, _look_up(file, cache)
        return check_file(file, data, MAX_ROWS), None
    except CannotCheck as error:
        return None, f"{file} is checked when the job starts ({error})"
    except OSError as error:
        raise UserError(f"{key}: {file}: cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def _check_form(file: str) -> None:
    """Raise UserError if a text does not have the form of a name on the hub."""
    if file.startswith(("/", ".", "~")):
        raise UserError(f"{file}: there is no such data file or folder")
    if Path(file).suffix.lower() in _OTHER_FORMATS:
        raise UserError(unknown_format(file))
    if not _DATA_SET.fullmatch(file):
        raise UserError(f"{file}: not the name of a data set on the hub, and there is no such file")


def _look_up(file: str, cache: HubCache) -> str | None:
    """Check that the job can have a data set on the hub; return what remains to be checked."""
    if cache.has_dataset(file):
        return None
    refuse_mistyped(f"data set {file}", file, folders_only=False)
    if cache.data_offline:
        raise UserError(not_cached(f"data set {file}", file, cache.datasets, cache.data_offline))
    return look_up(f"data set {file}", file, "data set", cache)
