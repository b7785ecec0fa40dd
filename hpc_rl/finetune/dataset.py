"""The tokenized data set of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.data.identity import contents_of, key_of, state_of
from hpc_rl.data.lazy import Joined, Rows
from hpc_rl.data.mixture import Mixture
from hpc_rl.errors import AgreedError
from hpc_rl.finetune.tokenized_cache import open_tokenized
from hpc_rl.finetune.tokenized_entry import Request
from hpc_rl.run_dir import RunDir, trusted_group
from hpc_rl.training.distributed import World
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.finetune.base import Objective


def load_training(
    objective: Objective, tokenizer: PreTrainedTokenizerBase, run: RunDir, world: World, stopping: Stopping
) -> tuple[Sequence[Any], Mixture | None]:
    """Return all items of the training data, in its order, and the proportions in which its files are used, if these
    have weights. See `load_items`."""
    files = objective.config.data.train_files
    if not isinstance(files, dict):
        return load_items(objective, files, tokenizer, "train", run, world, stopping), None
    parts = [_rows(objective, [file], tokenizer, "train", run, world, stopping) for file in files]
    sizes = list(map(len, parts))
    mixture = world.together(lambda: Mixture.of(files, sizes, sum(sizes)))
    if world.is_main:
        print(mixture.describe(files), flush=True)
    return objective.items(Joined(*parts)), mixture


def load_items(
    objective: Objective,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    run: RunDir,
    world: World,
    stopping: Stopping,
) -> Sequence[Any]:
    """Return all items of some files, in their order. Rank 0 prints their counts. Every rank calls this.

    Raises:
        AgreedError: a file is not valid, or nothing has a target token.
        Stopped: the run stops before the data is tokenized.
    """
    rows = _rows(objective, files, tokenizer, split, run, world, stopping)
    return objective.items(rows)


def _rows(
    objective: Objective,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    run: RunDir,
    world: World,
    stopping: Stopping,
) -> Rows[Any]:
    """Return the tokenized rows of some files; see `load_items`."""
    config = objective.config
    tokenize = world.together(lambda: objective.tokenizer(tokenizer))
    state = world.together(lambda: state_of(files))
    contents = world.together(lambda: contents_of(files, split, tokenizer.get_chat_template()))
    key = world.together(lambda: key_of(files, split, config.data, tokenizer) if world.is_main else None)
    key, contents = world.broadcast([key, contents])  # copies of the files on other nodes have other times
    request = Request(files, split, tokenize, objective.form, key, contents, state, config.data.columns)
    root = Path(config.cache.data_dir).absolute() if config.cache.data_dir else run.tokenized
    rows, counts = open_tokenized(request, root, trusted_group(run.path, config.slurm.group), world, stopping)
    if not len(rows):
        raise AgreedError(
            f"{', '.join(files)}: no row has a target token within data.max_length ({counts}): raise data.max_length"
        )
    if world.is_main:
        named = f", {files[0]}" if isinstance(config.data.train_files, dict) and split == "train" else ""
        print(f"{'training' if split == 'train' else 'validation'} data{named}: {counts}", flush=True)
    return rows
