"""Whether data can be read: each file's rows, by the reader that the job will use."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.config.ppo import PromptDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.data.rows import CannotCheck, check_file, check_prompts, is_file
from hpc_rl.errors import UserError
from hpc_rl.submission.hub import HubCache
from hpc_rl.submission.preflight.model import not_cached

_OTHER_DATA = (".arrow", ".csv", ".gz", ".tsv", ".txt", ".zip", ".zst")
MAX_ROWS = 10_000
"""Rows of a data file that are checked before the job is queued; the job itself checks all of them."""


def check_data(file: str, data: DataConfig | PromptDataConfig, cache: HubCache) -> str | None:
    if not is_file(file):
        if Path(file).is_dir():
            return f"data folder {file} is read when the job starts"
        if file.startswith(("/", ".")) or Path(file).suffix in _OTHER_DATA:
            raise UserError(f"{file}: no such folder, and no .jsonl or .parquet file")
        if not cache.offline:
            return f"data set {file} is a name on the hub: it is looked up when the job starts"
        if not cache.has_dataset(file):
            raise UserError(not_cached(f"data set {file}", file, cache.datasets))
        return None
    try:
        if isinstance(data, PromptDataConfig):
            check_prompts(file, data, MAX_ROWS)
        else:
            check_file(file, data, MAX_ROWS)
    except CannotCheck as error:
        return f"{file} is checked when the job starts ({error})"
    return None
