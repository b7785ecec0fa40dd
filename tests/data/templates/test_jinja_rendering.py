"""Chat templates without transformers, compared with what transformers renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hpc_rl.data.templates.chat import as_text
from hpc_rl.data.templates.jinja_rendering import (
    added_tokens,
    check_template,
    marks_generation,
    read_template,
    render_marked,
    render_plainly,
    special_tokens,
    stored_template,
    with_variables,
)
from hpc_rl.errors import UserError
from tests.data.conftest import CHATML, MARKED
from tests.data.families import FAMILIES

MESSAGES = [
    {"role": "user", "content": "a <b> é"},
    {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {"k": "é<"}}]},
]
TEMPLATES = {
    "chatml": CHATML,
    "marked": MARKED,
    "dashes": "{%- for m in messages -%}\n {%- generation -%} {{ m.content }} {%- endgeneration -%}\n{%- endfor -%}",
    "blocks are trimmed": "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "json": "{{ messages[1].tool_calls | tojson }} {{ messages[1].tool_calls | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "generation prompt": "{% if add_generation_prompt %}{{ 'yes' }}{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_the_text_is_that_of_transformers(
    tokenizer: PreTrainedTokenizerFast, name: str, generation_prompt: bool
) -> None:
    template = TEMPLATES[name]
    check_template(template, "here")
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=generation_prompt
    )
    assert render_plainly(template, MESSAGES, "here", special, generation_prompt) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}", "here: Jinja rejects the chat template in line 1: Unexpected end"),
        ("line\n{{ messages[0].content }", "here: Jinja rejects the chat template in line 2: unexpected '}'"),
        ("{% generation %}never closed", "here: Jinja rejects the chat template in line 1"),
        ("{{ messages | no_such_filter }}", "here: Jinja rejects the chat template in line 1: No filter named"),
        ("{% unknown_tag %}", "Encountered unknown tag 'unknown_tag'"),
    ],
)
def test_templates_that_jinja_rejects(template: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_template(template, "here")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system') }}", "{{ messages[0].content + 1 }}", "{{ nothing.at_all }}"]
)
def test_conversations_that_a_template_rejects(template: str) -> None:
    with pytest.raises(UserError, match=r"^file, row 1: the chat template rejects this conversation: "):
        render_plainly(template, MESSAGES, "file, row 1")


def test_a_template_cannot_change_the_machine() -> None:
    with pytest.raises(UserError, match="rejects this conversation"):
        render_plainly("{{ ''.__class__.__mro__[1].__subclasses__() }}", MESSAGES, "here")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", r"more than 0\.2 s"),
        ("{{ 10 ** (10 ** 10) }}", "with an operand above 10000"),
        ("{{ 'x' * 10000000000 }}", "with an operand above 10000"),
    ],
)
def test_a_template_that_never_ends(monkeypatch: pytest.MonkeyPatch, template: str, said: str) -> None:
    monkeypatch.setattr("hpc_rl.data.templates.jinja_rendering.RENDER_S", 0.2)
    with pytest.raises(UserError, match=said):
        render_plainly(template, MESSAGES, "here")
    assert render_plainly("{{ 2 ** 3 * 4 * 1.5 ~ 'ab' * 2 }}", MESSAGES, "here") == "48.0abab"


def test_a_template_that_never_ends_in_transformers(
    monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    for module in ("chat", "jinja_rendering"):
        monkeypatch.setattr(f"hpc_rl.data.templates.{module}.RENDER_S", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"here: the chat template rejects .* more than 0\.2 s"):
        as_text(tokenizer, endless, [{"role": "user", "content": "a"}], "here")


@pytest.mark.parametrize("name", ["marked", "dashes"])
def test_the_marked_text_is_found(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    text, spans = render_marked(TEMPLATES[name], [*MESSAGES, *MESSAGES], "here")
    assert text == tokenizer.apply_chat_template([*MESSAGES, *MESSAGES], chat_template=TEMPLATES[name], tokenize=False)
    expected = {"marked": ["x<|im_end|>"] * 2, "dashes": ["a <b> é", "x"] * 2}[name]
    assert [text[start:end] for start, end in spans] == expected


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (CHATML, False),
        (MARKED, True),
        ("{%-generation-%}{%-endgeneration-%}", True),
        (MARKED + "{% if messages | length == 2 %}{{ raise_exception('no') }}{% endif %}", True),
        (FAMILIES["smollm3"].template, False),  # its marks include the header of a turn
    ],
)
def test_marks(template: str, marks: bool) -> None:
    assert marks_generation(template) is marks


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("chat_template.jinja", "T"),
        ("chat_template.json", {"chat_template": "T"}),
        ("tokenizer_config.json", {"chat_template": "T"}),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "x", "template": "X"}, {"name": "default", "template": "T"}]},
        ),
    ],
)
def test_where_a_model_keeps_its_template(tmp_path: Path, file: str, contents: Any) -> None:
    assert stored_template(tmp_path) is None
    (tmp_path / file).write_text(contents if isinstance(contents, str) else json.dumps(contents))
    assert stored_template(tmp_path) == "T"


def test_the_file_wins_over_the_settings(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")
    assert stored_template(tmp_path) == "new"


@pytest.mark.parametrize("template", ["{{ a }}{{ b }}{{ c }}", "\n{{ a }}{{ b }}{{ c }}"])
def test_variables_have_values_unless_they_are_set(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    """A template that an earlier run has exported gets other values."""
    once = with_variables(template, {"a": 'it\'s "é" ', "b": None, "c": [True, {"d": 1.5}]})
    text = template.partition("{")[0] + "it's \"é\" None[True, {'d': 1.5}]"
    assert render_plainly(once, MESSAGES, "here") == text
    assert tokenizer.apply_chat_template(MESSAGES, chat_template=once, tokenize=False) == text
    assert tokenizer.apply_chat_template(MESSAGES, chat_template=once, tokenize=False, a=1, b=2, c=3).endswith("123")
    assert render_plainly(with_variables(once, {"b": 7}), MESSAGES, "here") == text.replace("None", "7")
    assert with_variables(once, {"a": 'it\'s "é" ', "b": None, "c": [True, {"d": 1.5}]}) == once
    assert with_variables(template, {}) == template


def test_added_tokens(tmp_path: Path) -> None:
    assert added_tokens(tmp_path) == {}
    added = [{"content": "<a>", "special": True}, {"content": "<b>", "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<b>", "pad_token": "<c>"}))
    assert added_tokens(tmp_path) == {"<a>": True, "<b>": True, "<c>": True}


def test_special_tokens(tmp_path: Path) -> None:
    assert special_tokens(tmp_path) == {}
    settings = {"bos_token": None, "eos_token": "<e>", "pad_token": {"content": "<p>"}, "add_bos_token": True, "x": "y"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert special_tokens(tmp_path) == {"eos_token": "<e>", "pad_token": "<p>"}


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "t.jinja", tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=r"^data\.chat_template: cannot read "):
            read_template(path, "data.chat_template")
