"""What tokenized data depends on, as short texts: equal texts mean equal tokens."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.data.reading.formats import is_file
from hpc_rl.data.reading.sources import local_states, sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Increase it if a change of this project, outside of the modules below, changes the files or what is in them."""
_CODE = (
    *(f"reading/{name}" for name in ("arrow_values", "formats", "preference_rows", "rows", "sources")),
    *(
        f"templates/{name}"
        for name in ("assistant_text", "chat", "jinja_rendering", "messages", "template_forms", "turn_ends")
    ),
    *("pairs", "prompt_files", "prompts", "sample_files", "sft_dataset", "tokenized"),
)
"""Modules of this package that make tokens of rows, which count by their text."""
_NOT_IN_TOKENS = {
    *("train_files", "val_files", "stream_rows", "chat_template", "train_batch_size", "shuffle", "max_response_length")
}
"""Options of data that no token depends on; the template counts by its text."""
_DATE = "strftime_now"
"""Function with which a template writes the date."""
_CALLS = ("truncation", "padding")
"""Settings of a tokenizer's backend that each call sets."""
_REMOTE_CODE = "transformers_modules"
"""Package of the classes that come with a model."""


def key_of(
    files: Sequence[str],
    split: str,
    data: FinetuneDataConfig | PromptConfig,
    tokenizer: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return a text for everything but the contents of the files: their paths, tokenizer, template and settings.

    Args:
        data: the options. For prompts, only those of PromptConfig count, so that all kinds of jobs can share them.
        tokenizer: see `tokenizer_of`.
        tools: JSON schemas of the tools of conversations; None if prompts are answered once.
    """
    kind = PromptConfig if isinstance(data, PromptConfig) else type(data)
    settings = data.model_dump(mode="json", include=kind.model_fields.keys() - _NOT_IN_TOKENS)
    # Templates write tables in their own order.
    in_order = json.dumps([None if tools is None else list(tools), settings.pop("chat_template_kwargs", None)])
    return _digest(
        FORMAT,
        [_text(Path(__file__).parent / f"{module}.py") for module in _CODE],
        [version(package) for package in ("transformers", "tokenizers", "jinja2")],
        [_place(name) for name in files],
        split,
        kind.__name__,
        settings,
        in_order,
        tokenizer,
    )


def tokenizer_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text for a tokenizer and its chat template. It takes long if the vocabulary is large.

    Args:
        tokenizer: one with a fast version, and with the template that is used.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return _digest(
        tokenizer.get_chat_template(),
        type(tokenizer).__name__,
        list(_remote_code(type(tokenizer))),
        {name: value for name, value in tokenizer.init_kwargs.items() if _is_setting(name, value)},
        tokenizer.special_tokens_map,
        tokenizer.all_special_tokens,
        {name: value for name, value in backend.items() if name not in _CALLS},
    )


def contents_of(files: Sequence[str], split: str, template: str = "") -> str:
    """Return a text for the contents of the files, and for the date if the template writes it.

    Raises:
        UserError: one of the files is missing or cannot be read.
    """
    return _digest(sources(files, split), _date_in(template))


def windows_of(run: Path) -> str:
    """Return a text for the windows of a run, whatever else they depend on: the run finds and removes all of them, and
    does not have to ask other runs.

    Args:
        run: the run directory.
    """
    return _digest("windows", str(run.absolute()))


def window_of(key: str, commit: str, rows: tuple[int, int], template: str = "") -> str:
    """Return a text for the tokens of a window of a data set on the hub, as one run reads it.

    Args:
        key: see `key_of`.
        commit: version of the data set.
        rows: number of the window's first row, and its most rows.
    """
    return _digest(key, commit, rows, _date_in(template))


def state_of(files: Sequence[str]) -> str:
    """Return a text that changes if this machine sees a change of the local files. It loads no data set.

    Raises:
        UserError: one of the files is missing or cannot be read.
    """
    return _digest(local_states(files))


def _date_in(template: str) -> str:
    return f"{datetime.now():%Y-%m-%d}" if _DATE in template else ""


def _place(name: str) -> str:
    """Return the whole path of a file or folder; other names are those of data sets on the hub."""
    path = Path(name)
    return str(path.expanduser().resolve()) if is_file(name) or path.exists() else name


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an argument of a tokenizer's class is a setting: a plain value, and no place of a file."""
    is_plain = isinstance(value, (bool, int, float, str, type(None)))
    return is_plain and not name.endswith(("name_or_path", "_file", "_hash", "chat_template"))


def _remote_code(kind: type) -> Iterator[str]:
    """Yield the source files of a class that comes with its model."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == _REMOTE_CODE:
            yield from map(_text, sorted(Path(inspect.getfile(one)).parent.glob("*.py")))


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
