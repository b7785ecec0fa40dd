"""The chat template of a run, and what it makes of conversations, with the characters that the assistant wrote."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.data.templates.assistant_text import ChatText, find_spans, remarks
from hpc_rl.data.templates.jinja_rendering import RENDER_S, check_template, read_template, with_variables
from hpc_rl.data.templates.messages import Chat, Message
from hpc_rl.data.templates.template_forms import forms_of
from hpc_rl.data.templates.turn_ends import Ends, find_ends
from hpc_rl.errors import UserError
from hpc_rl.software.bounds import cpu_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def chat_template(tokenizer: PreTrainedTokenizerBase, data: FinetuneDataConfig | PromptConfig) -> str:
    """Return the Jinja template to use: data.chat_template if set, otherwise the tokenizer's own. Its variables have
    the values of data.chat_template_kwargs by default.

    Raises:
        UserError: there is no template, the file cannot be read, or Jinja rejects the template.
    """
    if data.chat_template is not None:
        template = read_template(Path(data.chat_template).expanduser(), "data.chat_template")
        check_template(template, f"data.chat_template {data.chat_template}")
        return with_variables(template, data.chat_template_kwargs)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: set data.chat_template to a file with one"
        )
    template = tokenizer.get_chat_template()
    check_template(template, f"tokenizer {tokenizer.name_or_path!r}")
    return with_variables(template, data.chat_template_kwargs)


def render(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, ends: Ends) -> ChatText:
    """Render a conversation with a template that has no generation marks, and find the assistant's text.

    Args:
        ends: how the template ends turns.

    Raises:
        UserError: the template rejects the conversation, or the assistant's text cannot be found.
    """

    def text_of(part: list[Message], generation_prompt: bool) -> str:
        own = chat.extras
        return as_text(tokenizer, template, part, chat.where, generation_prompt, own.tools, own.variables)

    return find_spans(text_of, chat.messages, ends, chat.where)


def turn_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> Ends:
    """Return how the template ends turns of the assistant.

    The tokenizers of many base models name a different end-of-sequence token than their chat template writes.
    """

    def text_of(messages: list[Message], generation_prompt: bool) -> str:
        return as_text(tokenizer, template, messages, "", generation_prompt)

    bos_token: str | None = tokenizer.bos_token
    return find_ends(text_of, _added_tokens(tokenizer), bos_token)


def as_trained(tokenizer: PreTrainedTokenizerBase, hf: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer to store with a model that was trained with its chat template.

    Other programs end and pad texts by the tokens that are named in the tokenizer, in the generation settings and in
    the configuration. Those of a base model do not name the token that ends a turn, so they are set here.

    Args:
        hf: the model, whose configuration and generation settings are changed.
    """
    tokenizer = copy.deepcopy(tokenizer)
    template = tokenizer.get_chat_template()
    generation = getattr(hf, "generation_config", None)  # classifiers have none
    found = turn_ends(tokenizer, template)
    ends = _with_listed(tokenizer, found, getattr(generation, "eos_token_id", None))
    if not ends:
        return tokenizer
    tokenizer.pad_token = _padding(tokenizer, template, found.tokens)
    if found.answer is not None and "eos_token" not in template:  # otherwise the template would write another text
        tokenizer.eos_token = found.answer.token
    for settings in filter(None, [generation, hf.config.get_text_config()]):
        settings.eos_token_id = ends[0] if len(ends) == 1 else ends
        settings.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _padding(tokenizer: PreTrainedTokenizerBase, template: str, closing: Sequence[str]) -> str | None:
    """Return the token for padding: the tokenizer's own, or another one that no text ends with, because a model with
    scores has them at the last token that is no padding."""
    named = [tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    free = [*named, *(token for token in special if token not in template)]
    return next((token for token in free if token and token not in closing), tokenizer.eos_token)


def template_remarks(tokenizer: PreTrainedTokenizerBase, learns: bool = True) -> list[str]:
    """Return what a user should know about how the tokenizer's chat template treats turns; see `remarks`."""
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return remarks(tokenizer.get_chat_template(), _added_tokens(tokenizer), named, learns)


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Return the added tokens, each with whether it is special. Named tokens are special."""
    added = {token.content: bool(token.special) for token in tokenizer.added_tokens_decoder.values()}
    return {**added, **dict.fromkeys(tokenizer.all_special_tokens, True)}


def ending_token_ids(tokenizer: PreTrainedTokenizerBase, template: str, path: str | Path) -> list[int]:
    """Return the tokens that end a response, the one that ends an answer first.

    They are the tokens that end turns of the chat template, the tokenizer's end-of-sequence token, and those of the
    model's generation configuration, if it has one.

    Args:
        path: folder or name of the model.
    """
    from transformers import GenerationConfig

    listed = None
    with suppress(OSError):
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    return _with_listed(tokenizer, turn_ends(tokenizer, template), listed)


def _with_listed(tokenizer: PreTrainedTokenizerBase, ends: Ends, listed: int | list[int] | None) -> list[int]:
    found = [*map(tokenizer.convert_tokens_to_ids, ends.tokens), tokenizer.eos_token_id]
    found += listed if isinstance(listed, list) else [listed]
    return [token for token in dict.fromkeys(found) if isinstance(token, int)]


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
                forms_of(template).fitted(messages),
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
