"""Rows of a data set that the `datasets` library knows: a name on the hub or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def load_split(name: str, split: str) -> Dataset:
    """One split of a data set.

    Args:
        name: see load_splits.
        split: "train" or "test".

    Raises:
        UserError: not found, not reachable, or without that split (names the ones there are).
    """
    splits = load_splits(name)
    if split not in splits:
        raise UserError(f"the data set {name!r} has no split {split!r}; it has {', '.join(map(str, splits))}")
    return splits[split]


def load_splits(name: str) -> DatasetDict:
    """All splits of a data set.

    Args:
        name: a folder, a name on the hub, or `name:configuration` where the data set has several (openai/gsm8k:main).

    Raises:
        UserError: not found, or not reachable.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        return load_dataset(path, configuration or None)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot load the data set {name!r}: {reason}; where nodes have no internet, fetch it on the login node "
            f"(hpc-rl fetch {name}), or give a parquet or jsonl file"
        ) from error
