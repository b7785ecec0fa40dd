"""What tokenized data depends on, as short texts: equal texts mean equal tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl import __version__
from hpc_rl.config.finetune import FinetuneDataConfig
from hpc_rl.data.chat import chat_template
from hpc_rl.data.formats import is_file
from hpc_rl.data.sources import sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Increase it if a change of this project gives a row other tokens, or changes the files."""
_NOT_IN_TOKENS = {"train_files", "val_files", "chat_template", "train_batch_size", "shuffle"}
"""Options of data that no token depends on; the template counts by its text."""
_DATE = "strftime_now"
"""Function with which a template writes the date."""


def key_of(files: Sequence[str], split: str, data: FinetuneDataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text for everything but the contents of the files: their paths, tokenizer, template and settings.

    Args:
        tokenizer: one with a fast version.

    Raises:
        UserError: there is no chat template.
    """
    template = chat_template(tokenizer, data)
    settings = data.model_dump(mode="json", exclude=_NOT_IN_TOKENS)
    return _digest(
        FORMAT,
        __version__,
        [version(package) for package in ("transformers", "tokenizers", "jinja2")],
        [str(Path(name).expanduser().resolve()) if is_file(name) else name for name in files],
        split,
        type(data).__name__,
        settings,
        template,
        f"{datetime.now():%Y-%m-%d}" if _DATE in template else "",
        type(tokenizer).__name__,
        tokenizer.special_tokens_map,
        tokenizer.all_special_tokens,
        tokenizer.backend_tokenizer.to_str(),
    )


def contents_of(files: Sequence[str], split: str) -> str:
    """Return a text for the contents of the files.

    Raises:
        UserError: one of them is missing or cannot be read.
    """
    return _digest(sources(files, split))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
