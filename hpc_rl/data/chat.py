"""Conversations as text, with the characters that the assistant wrote.

To train only on the assistant's tokens, the tokens must be known. Templates with `{% generation %}` marks state them.
For other templates the marks follow from the rendered text: the conversation up to the start of the assistant's turn
must be a prefix of the whole text, and so must the conversation up to the end of that turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hpc_rl.config.finetune import FinetuneDataConfig
from hpc_rl.config.prompts import PromptConfig
from hpc_rl.data.rows import Message
from hpc_rl.data.template import RENDER_S, check_template, read_template
from hpc_rl.errors import UserError
from hpc_rl.host.bounds import cpu_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextOf = Callable[[list[Message], bool], str]
"""Renders messages; if the second argument is true, up to the start of the assistant's turn."""


@dataclass(frozen=True)
class ChatText:
    text: str
    spans: list[tuple[int, int]]
    """[start, end) of each assistant turn in text, including the end-of-turn token."""


def chat_template(tokenizer: PreTrainedTokenizerBase, data: FinetuneDataConfig | PromptConfig) -> str:
    """Return the Jinja template to use: data.chat_template if set, otherwise the tokenizer's own.

    Raises:
        UserError: there is no template, the file cannot be read, or Jinja rejects the template.
    """
    if data.chat_template is not None:
        template = read_template(Path(data.chat_template).expanduser(), "data.chat_template")
        check_template(template, f"data.chat_template {data.chat_template}")
        return template
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: set data.chat_template to a file with one"
        )
    template = tokenizer.get_chat_template()
    check_template(template, f"tokenizer {tokenizer.name_or_path!r}")
    return template


def render(tokenizer: PreTrainedTokenizerBase, template: str, messages: list[Message], where: str) -> ChatText:
    """Render a conversation with a template that has no generation marks, and find the assistant's text.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: the template rejects the conversation, or renders earlier turns differently as it grows.
    """

    def text_of(part: list[Message], generation_prompt: bool) -> str:
        return as_text(tokenizer, template, part, where, generation_prompt)

    return find_spans(text_of, messages, tokenizer.all_special_tokens, where)


def find_spans(text_of: TextOf, messages: list[Message], special_tokens: Iterable[str], where: str) -> ChatText:
    """Find the assistant's text by rendering the conversation up to the start and up to the end of each of its turns.

    Args:
        special_tokens: the end-of-turn token is one of these.
        where: file and row number, for the error.

    Raises:
        UserError: earlier turns are rendered differently as the conversation grows.
    """
    full = text_of(messages, False)
    ends = tuple(token for token in special_tokens if token)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = text_of(messages[:index], True) if index else ""
        through = full if index + 1 == len(messages) else text_of(messages[: index + 1], False)
        if not (full.startswith(through) and through.startswith(before)):
            raise UserError(
                f"{where}: the chat template renders turn {index + 1} differently if later turns follow, so the "
                "assistant's tokens cannot be found; set data.chat_template to a template that marks the assistant's "
                "text with {% generation %} ... {% endgeneration %}, or keep one assistant turn per row"
            )
        # Many templates write a line break after the end-of-turn token, which a model does not have to learn.
        closed = through.rstrip()
        spans.append((len(before), len(closed) if closed.endswith(ends) else len(through)))
    return ChatText(full, spans)


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    """Return the special token that the template writes at the end of an assistant turn, or None if there is none.

    The tokenizers of many base models name a different end-of-sequence token than their chat template writes.
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
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Render a conversation with its template; with generation_prompt up to the start of the assistant's turn.

    Args:
        where: file and row number, for the error.
        tools: JSON schemas of the tools that the template describes to the model.
        variables: further variables of the template.

    Raises:
        UserError: the template rejects the conversation.
    """
    try:
        with cpu_seconds(RENDER_S, "it"):
            text = tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **variables,
            )
    except (TemplateError, TypeError, TimeoutError) as error:
        raise UserError(f"{where}: the chat template rejects this conversation: {error}") from error
    assert isinstance(text, str)
    return text
