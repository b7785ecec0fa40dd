"""The checks of a data file's rows that a login node makes before it queues a job."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_rl.config.rl.generate import GenerateDataConfig
from hpc_rl.config.rl.prompts import PromptConfig, PromptDataConfig
from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.config.training.preferences import PreferenceDataConfig, RewardDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.formats import CannotCheck, Row, is_file, read_rows
from hpc_rl.data.reading.preference_rows import to_preference
from hpc_rl.data.reading.rows import to_messages, to_prompt
from hpc_rl.data.templates.messages import extras
from hpc_rl.errors import UserError

AnyData = FinetuneDataConfig | PromptConfig

READERS: dict[type[AnyData], Callable[[Row, Any, str], object]] = {
    DataConfig: to_messages,
    PreferenceDataConfig: to_preference,
    RewardDataConfig: to_preference,
    PromptDataConfig: to_prompt,
    GenerateDataConfig: to_prompt,
}
"""Options of the data -> what reads one of its rows: (row, options, place for errors)."""


def check_file(path: str, data: AnyData, max_rows: int | None = None) -> int:
    """Read the first max_rows rows of a file (None: all) as training will read them.

    Returns:
        The number of rows that were checked, at least 1.

    Raises:
        UserError: what training would stop at, in one line.
        CannotCheck: the path is a `datasets` name, or a parquet file and pyarrow is not installed.
    """
    if not is_file(path):
        if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
            raise UserError(f"{path}: no such file or folder")
        raise CannotCheck(f"{path} is a `datasets` name")
    checked = 0
    for checked, row in enumerate(islice(read_rows(path), max_rows), start=1):
        check_row(row, data, f"{path}, row {checked}")
    if not checked:
        raise UserError(f"{path}: the data set is empty")
    return checked


def check_row(row: Row, data: AnyData, where: str) -> None:
    """Read a row as training will read it.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: the row is not valid.
    """
    READERS[type(data)](row, data, where)
    extras(row, where)


def refuse_local(name: str) -> None:
    """Raise UserError if data to be read while a run trains (data.stream_rows) is on this machine, or is named as a
    file."""
    if Path(name).expanduser().exists():
        raise UserError(streams_local(name))
    if is_file(name):
        raise UserError(
            f"{name}: no such data file, and data.stream_rows reads a data set on the hub: name one, such as "
            "HuggingFaceTB/smoltalk:all, or correct the path and remove data.stream_rows"
        )


def refuse_offline(name: str, offline: str) -> None:
    """Raise UserError if data to be read while a run trains (data.stream_rows) cannot be read from the hub.

    Args:
        offline: the setting by which `datasets` does not ask the hub; empty if it does.
    """
    if offline:
        raise UserError(
            f"data.stream_rows reads {name} from the hub while the run trains, and compute nodes are offline "
            f"({offline}): let the first node reach the hub, or fetch the data (hpc-rl fetch {name}) and remove "
            "data.stream_rows"
        )


def streams_local(name: str) -> str:
    """Return the message for data.stream_rows with data that is on this machine."""
    return (
        f"data.stream_rows reads a data set on the hub, and {name} is on this machine, where it may be larger than "
        "memory anyway: remove data.stream_rows"
    )


def check_batch_size(rows: int, batch_size: int) -> None:
    """Check that the training data fills at least one batch.

    Args:
        rows: rows of all training files together.
        batch_size: data.train_batch_size.

    Raises:
        UserError: there are fewer rows than that.
    """
    if batch_size > rows:
        raise UserError(
            f"data.train_batch_size {batch_size:,} is larger than the training data ({rows:,} rows): "
            f"set it to at most {rows}, or add data"
        )
