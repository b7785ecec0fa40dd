"""The tokenized prompts of a run. The driver reads only those that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.config.generate import GenerateConfig
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.data.identity import contents_of, key_of, state_of
from hpc_rl.data.prompt_files import Prompts
from hpc_rl.data.prompts import Prompt, PromptCounts, prompt_tokenizer
from hpc_rl.data.sources import all_rows
from hpc_rl.data.tokenized import Tokenize, Unstorable
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir, trusted_group
from hpc_rl.token_cache.cache import open_tokenized
from hpc_rl.token_cache.entry import Files, Request
from hpc_rl.training.distributed import ONE_PROCESS
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    files: Sequence[str],
    split: str,
    config: PpoConfig | GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    run: RunDir,
    stopping: Stopping,
) -> tuple[Sequence[Prompt], PromptCounts]:
    """Return all prompts of some files, in their order, with at most data.max_prompt_length tokens each.

    They are tokenized once and mapped into memory, also by later runs. If files cannot hold one of them, all are
    kept in memory instead.

    Args:
        files: data files (formats.py), or names of `datasets` data sets.
        split: "train" or "test": the split of a `datasets` data set.
        tokenizer: one with the chat template that is used.
        tools: JSON schemas of the tools that the chat template describes to the model.

    Raises:
        UserError: a file or row is not valid (the message names file and row), the tokenizer has no chat template, or
            no prompt is left.
        Stopped: the run stops before the prompts are tokenized.
    """
    tokenize, limit = prompt_tokenizer(config.data, tokenizer, tools), config.data.max_prompt_length
    try:
        if not tokenizer.is_fast:
            raise Unstorable(
                "the tokenizer has no fast version (tokenizer.json), so a change of it would not be noticed"
            )
        request = _request(files, split, config, tokenizer, tools, tokenize)
        root = Path(config.cache.data_dir).absolute() if config.cache.data_dir else run.tokenized
        group = trusted_group(run.path, config.slurm.group)
        prompts, counts = open_tokenized(request, root, group, ONE_PROCESS, stopping)
    except Unstorable as error:
        names = ", ".join(files)
        print(f"the prompts of {names} are tokenized at every start and kept in memory: {error}", flush=True)
        prompts, counts = tokenize(all_rows(files, split))
    if not len(prompts):
        raise UserError(
            f"{', '.join(files)}: all {counts.rows:,} prompts are over data.max_prompt_length {limit} (the shortest "
            f"has {counts.shortest:,} tokens): raise data.max_prompt_length, or set data.overlong_prompts=truncate"
        )
    return prompts, counts


def _request(
    files: Sequence[str],
    split: str,
    config: PpoConfig | GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    tokenize: Tokenize,
) -> Request:
    state, contents = state_of(files), contents_of(files, split, tokenizer.get_chat_template())
    key = key_of(files, split, config.data, tokenizer, tools)
    return Request(Files(files, split, state), tokenize, Prompts(config.data.answer_key), key, contents)
