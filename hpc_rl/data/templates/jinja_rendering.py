"""Chat templates without transformers: read them from a model folder, check them with Jinja, and render them.

Tokenization renders templates with transformers (chat.py). A login node may not have transformers, so this module does
the same with Jinja alone: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from hpc_rl.errors import UserError
from hpc_rl.software.bounds import cpu_seconds

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_START, _END = "\x02", "\x03"
"""Control characters that mark the assistant's text while it is rendered."""
RENDER_S = 5.0
"""CPU time for one conversation, which usually takes less than a millisecond. A template may come from a stranger."""
_MOST = 10_000
"""Largest operand of a product, and largest exponent, in a template."""


class _Generation(Extension):
    """Accept `{% generation %} ... {% endgeneration %}`, which marks the assistant's text, and render its contents."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_START, _END))
        return [start, *body, end]


@lru_cache(maxsize=16)
def marks_generation(template: str) -> bool:
    """Return whether a template itself marks the text that the assistant writes.

    The marks of some templates, such as that of SmolLM3, include the header of a turn, which the generation prompt
    contains and a model never writes. They do not count.
    """
    if _GENERATION.search(template) is None:
        return False
    trial = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "Answer."}]
    try:
        text, spans = render_marked(template, trial, "chat template")
        prompt = render_plainly(template, trial[:1], "chat template", generation_prompt=True)
    except UserError:
        return True  # a template may refuse this conversation
    return not (spans and text.startswith(prompt) and spans[0][0] < len(prompt))


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """Return a template in which variables have values unless they are set. An exported model keeps them this way."""
    defaults = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!a} %}}{{%- endif %}}"
        for name, value in variables.items()
    )
    # Without the empty text, Jinja would remove a line break with which the template begins.
    prefix = "".join(defaults) + "{{ '' }}" if variables else ""
    return template if template.startswith(prefix) else prefix + template


def check_template(template: str, where: str) -> None:
    """Compile a chat template with the extensions that transformers offers to templates.

    Args:
        where: the option or file that names the template, for the error.

    Raises:
        UserError: Jinja rejects the template; the message gives the line.
    """
    try:
        _compiled(template)
    except TemplateSyntaxError as error:
        raise UserError(f"{where}: Jinja rejects the chat template in line {error.lineno}: {error.message}") from error
    except (TemplateError, SyntaxError) as error:
        raise UserError(f"{where}: Jinja rejects the chat template: {error}") from error


def render_plainly(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    variables: Mapping[str, Any] | None = None,
    generation_prompt: bool = False,
) -> str:
    """Render a conversation with Jinja alone, without the marks of the assistant's text.

    Args:
        where: file and row number, for the error.
        variables: those of the template, such as bos_token, eos_token and tools.
        generation_prompt: end the text at the start of the assistant's turn.

    Raises:
        UserError: Jinja rejects the template, or the template rejects the conversation.
    """
    text = _render(template, messages, where, variables, generation_prompt)
    return text.replace(_START, "").replace(_END, "")


def render_marked(
    template: str, messages: Sequence[Mapping[str, Any]], where: str, variables: Mapping[str, Any] | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation with a template that has generation marks.

    Args:
        where, variables: see render_plainly.

    Returns:
        the text, and [start, end) of each marked part in it.

    Raises:
        UserError: see render_plainly.
    """
    text, spans = "", []
    for number, part in enumerate(re.split(f"[{_START}{_END}]", _render(template, messages, where, variables))):
        if number % 2:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    variables: Mapping[str, Any] | None,
    generation_prompt: bool = False,
) -> str:
    check_template(template, where)
    variables = {"messages": messages, "add_generation_prompt": generation_prompt, **(variables or {})}
    try:
        with cpu_seconds(RENDER_S, "it"):
            return _compiled(template).render(variables)
    except Exception as error:  # a template calls methods of its values, which may raise anything
        raise UserError(f"{where}: the chat template rejects this conversation: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def stored_template(folder: Path) -> str | None:
    """Read the default chat template of a model folder, or None if the folder has none.

    Raises:
        UserError: a file of the template cannot be read as text.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_template(path)
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _json_object(folder / name).get("chat_template")
        if isinstance(found, list):  # several templates, each with a name
            found = next((each.get("template") for each in found if each.get("name") == "default"), None)
        if isinstance(found, str):
            return found
    return None


def read_template(path: Path, where: str = "") -> str:
    """Read a template file.

    Args:
        where: the option that names the file, for the error.

    Raises:
        UserError: the file cannot be read as UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where or 'chat template'}: cannot read {path} ({error})") from error


def added_tokens(folder: Path) -> dict[str, bool]:
    """Read the added tokens of a tokenizer, each with whether it is special."""
    added = _json_object(folder / "tokenizer.json").get("added_tokens")
    found = {str(token.get("content")): bool(token.get("special")) for token in added or () if isinstance(token, dict)}
    return {**found, **dict.fromkeys(special_tokens(folder).values(), True)}


def special_tokens(folder: Path) -> dict[str, str]:
    """Read the special tokens of a model folder by their names in templates: bos_token, eos_token, ..."""
    found: dict[str, str] = {}
    for name, value in _json_object(folder / "tokenizer_config.json").items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses operators whose result no time limit would stop."""

    intercepted_binops = frozenset(["**", "*"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a power or a product of small operands."""
        sizes = [abs(one) if isinstance(one, int | float) else len(one) for one in (left, right)]
        if (sizes[1] if operator == "**" else max(sizes)) > _MOST and max(sizes) > 1:
            raise SecurityError(f"{operator} with an operand above {_MOST}")
        return super().call_binop(context, operator, left, right)


def _environment() -> Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Convert to JSON without escaping HTML. Jinja's own filter escapes it, which models do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
