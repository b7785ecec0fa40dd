"""Conversations as text, with the characters that the assistant wrote.

Training on the assistant's tokens alone needs to know which they are. Templates with `{% generation %}` marks say so.
For others the marks follow from what they render: the conversation up to "the assistant's turn begins" must be a prefix
of the whole text, and so must the conversation up to the turn's end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from hpc_rl.config.ppo import PromptDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.data.rows import Message
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatText:
    text: str
    spans: list[tuple[int, int]]
    """[start, end) of each assistant turn in text, end-of-turn token included."""


def chat_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig | PromptDataConfig) -> str:
    """The Jinja template to use: data.chat_template where given, else the tokenizer's own.

    Raises:
        UserError: neither is there, or the file cannot be read.
    """
    if data.chat_template is not None:
        path = Path(data.chat_template).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template: cannot read {path} ({error})") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: give a file with one as data.chat_template"
        )
    template: str = tokenizer.get_chat_template()
    return template


def marks_generation(template: str) -> bool:
    """Whether a template says itself which text the assistant writes."""
    return _GENERATION.search(template) is not None


def render(tokenizer: PreTrainedTokenizerBase, template: str, messages: list[Message], where: str) -> ChatText:
    """A conversation as text, for a template without generation marks.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: the template refuses the conversation, or renders earlier turns differently as it grows.
    """
    full = as_text(tokenizer, template, messages, where)
    ends = tuple(token for token in tokenizer.all_special_tokens if token)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = as_text(tokenizer, template, messages[:index], where, generation_prompt=True) if index else ""
        is_last = index + 1 == len(messages)
        said = full if is_last else as_text(tokenizer, template, messages[: index + 1], where)
        if not (full.startswith(said) and said.startswith(asked)):
            raise UserError(
                f"{where}: the chat template renders turn {index + 1} differently once later turns follow, so its "
                "tokens cannot be told apart; set data.chat_template to one that marks the assistant's text with "
                "{% generation %} ... {% endgeneration %}, or keep one assistant turn per row"
            )
        # After the end-of-turn token many templates write a line break, which no model has to learn to write.
        closed = said.rstrip()
        spans.append((len(asked), len(closed) if closed.endswith(ends) else len(said)))
    return ChatText(full, spans)


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    """The special token that ends an assistant's turn, if the template writes one.

    Many tokenizers of base models name another token as the end of a sequence than their chat template writes.
    """
    asked = [{"role": "user", "content": "?"}]
    before = as_text(tokenizer, template, asked, "", generation_prompt=True)
    after = as_text(tokenizer, template, [*asked, {"role": "assistant", "content": "!"}], "")
    ending = after.removeprefix(before).lstrip("!") if after.startswith(before) else ""
    ids: list[int] = tokenizer(ending, add_special_tokens=False)["input_ids"] if ending else []
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None


def as_text(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: list[Message],
    where: str,
    generation_prompt: bool = False,
) -> str:
    """A conversation as its template writes it; with generation_prompt up to where the assistant's turn begins.

    Raises:
        UserError: the template refuses the conversation.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=generation_prompt
        )
    except TemplateError as error:
        raise UserError(f"{where}: the chat template refuses this conversation: {error}") from error
    assert isinstance(text, str)
    return text
