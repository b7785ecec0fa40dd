"""The tokenized prompts of a run. The driver reads only those that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.identity import contents_of, key_of, state_of, tokenizer_of
from hpc_rl.data.prompt_files import Prompts
from hpc_rl.data.prompts import Prompt, PromptCounts, prompt_tokenizer
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.data.tokenized import Tokenize, Unstorable
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir, trusted_group
from hpc_rl.token_cache.cache import Unwritable, folder_of, open_cached
from hpc_rl.token_cache.entry import Files, TokenizeRequest
from hpc_rl.training.parallel.distributed import ONE_PROCESS
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLoader:
    """Loads the prompts of a run's files.

    Args:
        tokenizer: one with the chat template that is used.
        tools: JSON schemas of the tools of conversations; None if prompts are answered once.
    """

    def __init__(
        self,
        config: PpoConfig | GenerateConfig,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] | None,
        run: RunDir,
        stopping: Stopping,
    ) -> None:
        self._config, self._tokenizer, self._tools = config, tokenizer, tools
        self._run, self._stopping = run, stopping

    def load(self, files: Sequence[str], split: str) -> tuple[Sequence[Prompt], PromptCounts]:
        """Return all prompts of some files, in their order, with at most data.max_prompt_length tokens each.

        They are tokenized once and mapped into memory, also by later runs. If they cannot be stored, they are tokenized
        and kept in memory.

        Args:
            files: data files (formats.py), or names of `datasets` data sets.
            split: "train" or "test": the split of a `datasets` data set.

        Raises:
            UserError: a file or row is not valid (the message names file and row), the tokenizer has no chat template,
                or no prompt is left.
            Stopped: the run stops before the prompts are tokenized.
        """
        data = self._config.data
        tokenize = prompt_tokenizer(data, self._tokenizer, self._tools)
        try:
            prompts, counts = self._open(files, split, tokenize)
        except Unstorable as error:
            names = ", ".join(files)
            print(f"the prompts of {names} are tokenized at every start and kept in memory: {error}", flush=True)
            prompts, counts = tokenize(all_rows(files, split))
        if not len(prompts):
            raise UserError(
                f"{', '.join(files)}: all {counts.rows:,} prompts are over data.max_prompt_length "
                f"{data.max_prompt_length} (the shortest has {counts.shortest:,} tokens): raise "
                "data.max_prompt_length, or set data.overlong_prompts=truncate"
            )
        return prompts, counts

    def _open(self, files: Sequence[str], split: str, tokenize: Tokenize) -> tuple[Sequence[Prompt], PromptCounts]:
        """Return the prompts from files, which are written if there are none; see `load`. Raises Unstorable."""
        if not self._tokenizer.is_fast:
            raise Unstorable("the tokenizer has no fast version (tokenizer.json), so a change would not be noticed")
        state, contents = state_of(files), contents_of(files, split, self._tokenizer.get_chat_template())
        key = key_of(files, split, self._config.data, self._tokenizer_text, self._tools)
        request = TokenizeRequest(
            Files(files, split, state), tokenize, Prompts(self._config.data.answer_key), key, contents
        )
        folder = folder_of(self._config, self._run)
        group = trusted_group(self._run.path, self._config.slurm.group)
        try:
            return open_cached(request, folder, group, ONE_PROCESS, self._stopping)
        except Unwritable as error:
            raise Unstorable(
                f"{folder} cannot be used ({error}); to store them, set cache.data_dir to a folder with space that "
                "only you can write to"
            ) from error

    @cached_property
    def _tokenizer_text(self) -> str:
        return tokenizer_of(self._tokenizer)
