"""The tokenized data set of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc_rl.data.identity import contents_of, key_of, state_of, tokenizer_of
from hpc_rl.data.lazy import Joined, LazyRows
from hpc_rl.data.mixture import Mixture
from hpc_rl.errors import AgreedError
from hpc_rl.finetune.training_data import Epochs, TrainingData
from hpc_rl.finetune.windows import Windows
from hpc_rl.run_dir import RunDir, trusted_group
from hpc_rl.token_cache.cache import folder_of, open_tokenized
from hpc_rl.token_cache.entry import Files, TokenizeRequest
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.finetune.base import Objective


def load_training(
    objective: Objective, tokenizer: PreTrainedTokenizerBase, run: RunDir, world: World, stopping: Stopping
) -> TrainingData:
    """Return the training data: all of its items, in the order of the data, or windows of them. See `load_items`."""
    config = objective.config
    files = config.data.train_files
    if config.data.stream_rows is not None:
        return Windows(objective, tokenizer, folder_of(config, run), run, world, stopping)
    if not isinstance(files, dict):
        return Epochs(load_items(objective, files, tokenizer, "train", run, world, stopping), config)
    parts = [_rows(objective, [file], tokenizer, "train", run, world, stopping) for file in files]
    sizes = list(map(len, parts))
    mixture = world.together(lambda: Mixture.of(files, sizes, sum(sizes)))
    if world.is_main:
        print(mixture.describe(files), flush=True)
    return Epochs(objective.items(Joined(*parts)), config, mixture)


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
) -> LazyRows[Any]:
    """Return the tokenized rows of some files; see `load_items`."""
    config = objective.config
    tokenize = world.together(lambda: objective.tokenizer(tokenizer))
    state = world.together(lambda: state_of(files))
    contents = world.together(lambda: contents_of(files, split, tokenizer.get_chat_template()))
    key = world.together(lambda: key_of(files, split, config.data, tokenizer_of(tokenizer)) if world.is_main else None)
    key, contents = world.broadcast([key, contents])  # copies of the files on other nodes have other times
    source = Files(files, split, state, config.data.columns)
    request = TokenizeRequest(source, tokenize, objective.form, key, contents)
    group = trusted_group(run.path, config.slurm.group)
    rows, counts = open_tokenized(request, folder_of(config, run), group, world, stopping)
    if not len(rows):
        raise AgreedError(
            f"{', '.join(files)}: no row has a target token within data.max_length ({counts}): raise data.max_length"
        )
    if world.is_main:
        named = f", {files[0]}" if isinstance(config.data.train_files, dict) and split == "train" else ""
        print(f"{'training' if split == 'train' else 'validation'} data{named}: {counts}", flush=True)
    return rows
