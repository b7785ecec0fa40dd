"""A data file's rows as training sees them: `hpc-rl data check`.

The tokens of a row need transformers. Without it, the rendered chat template is shown as text.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.config.training.preferences import PreferenceDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.preference_rows import PairRow, to_preference
from hpc_rl.data.reading.row_checks import AnyData, check_row
from hpc_rl.data.reading.rows import to_messages, to_prompt, unlearned
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.data.templates.assistant_text import find_spans, remarks
from hpc_rl.data.templates.jinja_rendering import (
    added_tokens,
    marks_generation,
    read_template,
    render_marked,
    render_plainly,
    special_tokens,
    stored_template,
    with_variables,
)
from hpc_rl.data.templates.messages import READ_KEYS, TRAIN, Message, extras, fields_without_effect, without_effect
from hpc_rl.data.templates.template_forms import forms_of, unused
from hpc_rl.data.templates.turn_ends import find_ends
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.formats.hub import loading_problem
from hpc_rl.software.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.data.sft_dataset import Sample

_MOST_ROWS = 10_000
"""Rows that are rendered to find what the chat template leaves out."""
_NOTHING = (None, "", [], {})
_LABELS = {True: "loss", False: "no loss", None: ""}


@dataclass(frozen=True)
class Part:
    """Consecutive text of a row, in pieces: tokens, or one piece if there is no tokenizer."""

    loss: bool | None
    """Whether the pieces carry loss; None if the row is a prompt, which has no loss."""
    pieces: list[str]


def check_data(file: str, number: int, data: AnyData, model: ModelConfig, folder: Path | None) -> Iterator[str]:
    """Check all rows of a file, then describe one of them.

    Args:
        number: the row to describe, from 1.
        folder: folder of the tokenizer on this machine; None if it has only a name on the hub.

    Yields:
        lines of text.

    Raises:
        UserError: a row, the chat template or the tokenizer is not valid, or there is no such row.
    """
    rows, row, unread = _checked(file, number, data)
    yield from _summary(file, rows, data, unread)
    if row is None:
        raise UserError(f"{file} has {counted(rows, 'row')}: choose --row from 1 to {rows}")
    where = f"{file}, row {number}"
    try:
        tokenizer = _load_tokenizer(model, folder)
    except ModuleNotFoundError as error:
        if folder is None:
            raise UserError(
                f"model.path {model.path} is a name on the hub, and {sys.executable} has no {error.name} to load its "
                f"tokenizer: give a folder, or run\n{install_command('train', sys.executable)}"
            ) from error
        yield from _remarks(data, folder)
        yield from _effects(_unused_plainly(file, data, folder), rows)
        yield f"row {number} as text, rendered with the chat template:"
        yield from _layout(_text_parts(row, where, data, folder))
        yield f"The tokens are not shown, because {sys.executable} has no {error.name}. Set slurm.python in the site"
        yield "profile to a Python that has it, or install it:"
        yield install_command("train", sys.executable)
    else:
        tokenize = _tokenize(data, tokenizer)
        yield from _effects(tokenize(islice(all_rows([file], "train"), _MOST_ROWS))[1].unused, rows)
        yield from _describe_tokens(row, number, where, data, tokenizer)
    if isinstance(data, PromptConfig):
        answer = json.dumps(to_prompt(row, data, where)[1], ensure_ascii=False, default=str)
        yield f"reference answer (data.answer_key={data.answer_key or 'null'}): {answer}"


def check_rows(file: str, data: AnyData) -> Iterator[str]:
    """Check all rows of a file, without a tokenizer; yield lines of text.

    Raises:
        UserError: a row is not valid.
    """
    rows, _, unread = _checked(file, 1, data)
    yield from _summary(file, rows, data, unread)


def _summary(file: str, rows: int, data: AnyData, unread: Mapping[str, int]) -> Iterator[str]:
    yield f"{file}: {counted(rows, 'row')}, all valid {_kind_of_rows(data)}"
    if unread:
        found = ", ".join(f"{name} ({count:,})" for name, count in sorted(unread.items()))
        yield f"columns that are not read, with the number of rows that have a value: {found}"


def _effects(unused: Mapping[str, int], rows: int) -> Iterator[str]:
    of = f" in the first {_MOST_ROWS:,} rows" if rows > _MOST_ROWS else ""
    for text in fields_without_effect(unused):
        yield f"{text}{of}: the chat template does not render them, or nothing reads them"


def _kind_of_rows(data: AnyData) -> str:
    if isinstance(data, PreferenceDataConfig):
        return "responses with labels" if data.labels else "pairs"
    return "chats" if isinstance(data, DataConfig) else "prompts"


def _checked(file: str, number: int, data: AnyData) -> tuple[int, Row | None, dict[str, int]]:
    """Check every row; return how many there are, the one with this number, and which columns are not read.

    A reward function may read any column of a prompt.
    """
    rows, found = 0, None
    unread: Counter[str] = Counter()
    read = {*data.columns, *READ_KEYS} if isinstance(data, FinetuneDataConfig) else None
    for rows, (row, where) in enumerate(all_rows([file], "train"), start=1):
        check_row(row, data, where)
        if read is not None:
            unread.update(str(name) for name, value in row.items() if name not in read and value not in _NOTHING)
        if rows == number:
            found = row
    return rows, found, unread


def _load_tokenizer(model: ModelConfig, folder: Path | None) -> PreTrainedTokenizerBase:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it announces that torch is missing, if it is
    from transformers import AutoTokenizer

    path = str(folder or model.tokenizer_path or model.path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"no tokenizer could be loaded from {path!r}: {loading_problem(path, error)}") from error
    return tokenizer


def _tokenize(
    data: AnyData, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Iterable[tuple[Row, str]]], tuple[Sequence[Any], Any]]:
    """Return what tokenizes rows as training does; see `chat_tokenizer`."""
    from hpc_rl.data.pairs import preference_tokenizer
    from hpc_rl.data.prompts import prompt_tokenizer
    from hpc_rl.data.sft_dataset import chat_tokenizer

    if isinstance(data, PromptConfig):
        return prompt_tokenizer(data, tokenizer)
    if isinstance(data, PreferenceDataConfig):
        return preference_tokenizer(data, tokenizer)
    assert isinstance(data, DataConfig)
    return chat_tokenizer(data, tokenizer)


def _describe_tokens(
    row: Row, number: int, where: str, data: AnyData, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    from hpc_rl.data.templates.chat import chat_template, template_remarks

    tokenizer.chat_template = chat_template(tokenizer, data)
    yield from template_remarks(tokenizer, learns=not isinstance(data, PromptConfig))
    if isinstance(data, PromptConfig):
        prompts, prompt_counts = _tokenize(data, tokenizer)([(row, where)])
        length = counted(prompt_counts.shortest, "token")
        if not prompts:
            yield f"row {number} is dropped: it has {length}, over data.max_prompt_length {data.max_prompt_length:,}"
            return
        cut = f", cut to the last {data.max_prompt_length:,}" if prompt_counts.truncated else ""
        yield f"row {number} as the policy sees it ({length}{cut}):"
        yield from _layout([Part(None, [tokenizer.decode([token]) for token in prompts[0].token_ids.tolist()])])
        return
    if isinstance(data, PreferenceDataConfig):
        yield from _describe_preference(row, number, where, data, tokenizer)
        return
    assert isinstance(data, DataConfig)
    (sample,), counts = _tokenize(data, tokenizer)([(row, where)])
    limit = f"data.max_length {data.max_length:,}"
    if sample is None:
        reason = f"it is longer than {limit}" if counts.dropped else f"no assistant token is left within {limit}"
        yield f"row {number} is dropped: {reason}"
        return
    cut = f"; cut to {limit}" if counts.truncated else ""
    yield f"row {number} ({counted(counts.tokens, 'token')}, {counts.target_tokens:,} of them carry loss{cut}):"
    yield from _layout(_token_parts(sample, tokenizer))


def _describe_preference(
    row: Row, number: int, where: str, data: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    (found,), counts = _tokenize(data, tokenizer)([(row, where)])
    if found is None:
        reasons = {
            "both responses are the same": counts.equal,
            f"a sample is longer than data.max_length {data.max_length:,}": counts.dropped,
            "a response has no token": counts.no_target,
        }
        yield f"row {number} is dropped: {next(reason for reason, count in reasons.items() if count)}"
        return
    names = ("chosen", "rejected") if len(found.samples) == 2 else (f"response with {_labels(found.values)}",)
    for name, sample in zip(names, found.samples, strict=True):
        targets = int(sample.loss_mask.sum())
        yield f"row {number}, {name} ({counted(len(sample.input_ids), 'token')}, {targets:,} of them the response):"
        yield from _layout(_token_parts(sample, tokenizer))


def _labels(values: Sequence[float]) -> str:
    return f"label{'s' if len(values) > 1 else ''} {', '.join(f'{value:g}' for value in values)}"


def _token_parts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Part]:
    pieces = zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True)
    for loss, run in groupby(pieces, key=lambda pair: pair[0]):
        yield Part(loss, [tokenizer.decode([token]) for _, token in run])


def _template(data: AnyData, folder: Path) -> str:
    """Read the chat template without transformers. Raises UserError if the folder has none."""
    if data.chat_template is not None:
        source: str | None = read_template(Path(data.chat_template).expanduser(), "data.chat_template")
    else:
        source = stored_template(folder)
    if source is None:
        raise UserError(f"{folder} has no chat template: set data.chat_template to a file with one")
    return with_variables(source, data.chat_template_kwargs)


def _remarks(data: AnyData, folder: Path) -> list[str]:
    added, special = added_tokens(folder), special_tokens(folder)
    return remarks(_template(data, folder), added, special, not isinstance(data, PromptConfig))


def _text_parts(row: Row, where: str, data: AnyData, folder: Path) -> list[Part]:
    """Render a row without transformers."""
    source, variables = _template(data, folder), _variables(row, where, folder)
    forms = forms_of(source)

    def text_of(messages: list[Message], generation_prompt: bool) -> str:
        return render_plainly(source, forms.fitted(messages), where, variables, generation_prompt)

    chats = _chats(row, data, where)
    if not isinstance(data, DataConfig):
        return [Part(None, [text_of(messages, isinstance(data, PromptConfig))]) for messages in chats]
    (messages,) = chats
    if marks_generation(source):
        text, spans = render_marked(source, forms.fitted(messages), where, variables)
    else:
        ends = find_ends(text_of, added_tokens(folder), special_tokens(folder).get("bos_token"))
        chat = find_spans(text_of, messages, ends, where)
        text, spans = chat.text, chat.spans
    learned = [message.get(TRAIN, True) for message in messages if message["role"] == "assistant"]
    parts, at = [], 0
    for index, (start, end) in enumerate(spans):
        has_loss = len(learned) != len(spans) or learned[index]
        parts += [Part(False, [text[at:start]]), Part(has_loss, [text[start:end]])]
        at = end
    return [part for part in [*parts, Part(False, [text[at:]])] if part.pieces != [""]]


def _chats(row: Row, data: AnyData, where: str) -> list[list[Message]]:
    """Return what is rendered of a row: a chat, the two of a pair, or a prompt."""
    if isinstance(data, PromptConfig):
        return [unlearned(to_prompt(row, data, where)[0])]
    if isinstance(data, PreferenceDataConfig):
        found = to_preference(row, data, where)
        return [found.chosen, found.rejected] if isinstance(found, PairRow) else [found.messages]
    assert isinstance(data, DataConfig)
    return [to_messages(row, data, where)]


def _variables(row: Row, where: str, folder: Path) -> dict[str, Any]:
    added = extras(row, where)
    return {**special_tokens(folder), **added.variables, "tools": added.tools or None}


def _unused_plainly(file: str, data: AnyData, folder: Path) -> dict[str, int]:
    """Count the fields and columns without effect on the text, without transformers."""
    source, found = _template(data, folder), Counter[str]()
    forms = forms_of(source)
    for row, where in islice(all_rows([file], "train"), _MOST_ROWS):
        variables = _variables(row, where, folder)

        def text_of(messages: list[Message], tools: list[Any], where: str = where, own: Any = variables) -> str:
            return render_plainly(source, forms.fitted(messages), where, {**own, "tools": tools or None})

        for messages in _chats(row, data, where):
            found.update(unused(None, messages, variables["tools"] or (), text_of, where))
        found.update(without_effect(row, data.columns))
    return found


def _layout(parts: Iterable[Part]) -> Iterator[str]:
    """Write each part as quoted pieces behind its label."""
    for part in parts:
        label = f"  {_LABELS[part.loss]:8} " if part.loss is not None else "  "
        # A space inside a piece is replaced while wrapping, so that no piece is broken.
        quoted = " ".join(json.dumps(piece, ensure_ascii=False).replace(" ", "\0") for piece in part.pieces)
        lines = textwrap.wrap(
            quoted,
            110,
            initial_indent=label,
            subsequent_indent=" " * len(label),
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from (line.replace("\0", " ") for line in lines)
