"""Rows of a data set that the `datasets` library loads: a name on the hub or a folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpc_rl.errors import UserError
from hpc_rl.formats.hub import check_hub
from hpc_rl.software.installation import install_command

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def load_split(name: str, split: str) -> Dataset:
    """Load one split of a data set.

    Args:
        name: see load_splits.
        split: "train" or "test".

    Raises:
        UserError: the data set is not found, not reachable, or has no such split (the message lists its splits).
    """
    found: Dataset = split_of(load_splits(name), name, split)
    return found


def load_splits(name: str) -> DatasetDict:
    """Load all splits of a data set.

    Args:
        name: a folder, a name on the hub, or `name:configuration` if the data set has several (openai/gsm8k:main).

    Raises:
        UserError: the data set is not found or not reachable, the hub does not answer, or `datasets` is not installed.
    """
    datasets = library(name)
    if not Path(name).exists():
        check_hub(name)
    path, configuration = (name, None) if Path(name).exists() else parts_of(name)
    try:
        return datasets.load_dataset(path, configuration)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot load the data set {name!r}: {reason}; if nodes have no internet, fetch it on the login node "
            f"(hpc-rl fetch {name}), or give a parquet or jsonl file"
        ) from error


def library(name: str) -> ModuleType:
    """Return the library `datasets`, which is needed for the data set of this name.

    Raises:
        UserError: it is not installed.
    """
    try:
        import datasets
        import datasets.exceptions
    except ModuleNotFoundError as error:
        raise UserError(
            f"cannot load the data set {name!r}: {sys.executable} has no {error.name}; install it with\n"
            f"{install_command('train', sys.executable)}\n"
            "or give a jsonl, csv or parquet file instead of the name"
        ) from error
    return datasets


def parts_of(name: str) -> tuple[str, str | None]:
    """Return the path of a data set on the hub, and its configuration, if one is named."""
    path, _, configuration = name.partition(":")
    return path, configuration or None


def split_of(splits: Mapping[str, Any], name: str, split: str) -> Any:
    """Return one of the splits of a data set.

    Raises:
        UserError: there is no such split.
    """
    if split not in splits:
        raise UserError(f"the data set {name!r} has no split {split!r}; it has {', '.join(map(str, splits))}")
    return splits[split]
