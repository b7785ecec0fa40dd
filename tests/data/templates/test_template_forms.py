"""What chat templates expect of messages, and which fields they leave out."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.pairs import preference_tokenizer
from hpc_rl.data.prompts import prompt_tokenizer
from hpc_rl.data.sft_dataset import chat_tokenizer
from hpc_rl.data.templates.chat import as_text
from hpc_rl.data.templates.template_forms import Forms, forms_of, unused
from hpc_rl.errors import UserError
from tests.data.conftest import CHATML, MARKED

ASKED = {"role": "user", "content": "What?"}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"place": "Bonn am Rhein"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "Sunny.", "tool_call_id": "call-1234", "name": "look_up"}
SAID = {"role": "assistant", "content": "It is sunny."}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}

_BEGIN, _END = "{% for m in messages %}<|im_start|>{{ m.role }}\n", "<|im_end|>\n{% endfor %}"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"


def chatml(body: str, before: str = "") -> str:
    return before + _BEGIN + body + _END + _OPEN


TOOLS = chatml("{{ m.content or '' }}" + _CALLS, "{% if tools %}{{ tools | tojson }}{% endif %}")
THINKS = chatml("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{% if m.content is not none %}{{ m.content + '' }}{% endif %}" + _CALLS, Forms("null")),
        ("{% if m.content is none %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}", Forms("null")),
        ("{{ m.content }}" + _CALLS, Forms("absent")),
        ("{{ m.content + '' }}" + _CALLS, Forms("empty")),
        ("{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls %}{{ c.function.name }} "
         "{{ c.function.arguments }}{% endfor %}", Forms("null", arguments_as_text=True)),
        ("{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}",
         Forms("null", arguments_as_text=True)),
        ("{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in "
         "c.function.arguments.items() %}<k>{{ k }}</k>{{ v }}{% endfor %}{% endfor %}", Forms("null")),
        ("{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function.name }}{% if c.function.arguments is string %}"
         "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}",
         Forms("null")),
        ("{{ m.content }}{{ m.thinking }}", Forms("absent", reasoning="thinking")),
        ("{{ m['reasoning'] }}{{ enable_thinking }}{{ m.content }}", Forms("absent", reasoning="reasoning")),
    ],
)  # fmt: skip
def test_what_a_template_expects(body: str, expected: Forms) -> None:
    found = forms_of(chatml(body))
    assert found == Forms(expected.content, expected.arguments_as_text, expected.reasoning, has_developer=False)


@pytest.mark.parametrize(
    ("forms", "given", "expected"),
    [
        (Forms("null"), CALLING, CALLING),
        (Forms("absent"), CALLING, {"role": "assistant", "tool_calls": [CALL]}),
        (Forms("empty"), CALLING, {**CALLING, "content": ""}),
        (Forms(reasoning="thinking"), {**SAID, "reasoning_content": "hm"}, {**SAID, "thinking": "hm"}),
        (Forms(reasoning="thinking"), {**SAID, "reasoning": "a", "thinking": "b"},
         {**SAID, "reasoning": "a", "thinking": "b"}),
        (Forms(), {**SAID, "reasoning": "hm", "train": False}, {**SAID, "reasoning": "hm"}),
        (Forms(has_developer=False), {"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (Forms(), {"role": "developer", "content": "x"}, {"role": "developer", "content": "x"}),
    ],
)  # fmt: skip
def test_messages_in_the_forms_of_a_template(forms: Forms, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert forms.fitted([given]) == [expected]


def test_arguments_as_text() -> None:
    (found,) = Forms(arguments_as_text=True).fitted([CALLING])
    assert found["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"place": "Bonn am Rhein"}'}
    assert CALL["function"]["arguments"] == {"place": "Bonn am Rhein"}


def text_of(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    """Return the text that sft trains on, the part of it that carries loss, and the counts of unused fields."""
    (sample,), counts = chat_tokenizer(DataConfig(train_files=["x.jsonl"]), tokenizer)([(row, "f, row 1")])
    assert sample is not None
    return tokenizer.decode(sample.input_ids), tokenizer.decode(sample.input_ids[sample.loss_mask]), counts.unused


@pytest.mark.parametrize("arguments", [{"place": "Bonn am Rhein"}, '{"place":"Bonn am Rhein"}'])
def test_calls_and_tools_are_trained_as_the_template_writes_them(
    tokenizer: PreTrainedTokenizerFast, arguments: Any
) -> None:
    tokenizer.chat_template = TOOLS
    calling = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": arguments}}]}
    result = {"role": "tool", "content": "Sunny."}
    row = {"messages": [ASKED, calling, result, SAID], "tools": [TOOL]}
    text, learned, unused = text_of(tokenizer, row)
    called = '<call>{"name": "look_up", "arguments": {"place": "Bonn am Rhein"}}</call>'
    assert learned == f"{called}<|im_end|>It is sunny.<|im_end|>" and not unused
    assert text.startswith('[{"type": "function", "function": {"name": "look_up"')


def test_fields_that_a_template_leaves_out_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML
    thought = {**SAID, "reasoning_content": "The sky is blue.", "tool_calls": [CALL]}
    row = {"messages": [{**ASKED, "name": "Ann"}, thought, RESULT, SAID], "tools": [TOOL]}
    expected = {"name": 2, "reasoning_content": 1, "tool_calls": 1, "tool_call_id": 1, "tools": 1}
    assert text_of(tokenizer, row)[2] == expected
    (_, _), counts = chat_tokenizer(DataConfig(train_files=["x.jsonl"]), tokenizer)([(row, "a"), (row, "b")])
    assert counts.unused == {name: 2 * number for name, number in expected.items()}
    shown = "name (4), reasoning_content (2), tool_call_id (2), tool_calls (2), tools (2)"
    assert str(counts).endswith(f"; fields without effect: {shown}")
    tokenizer.chat_template = chatml("{{ m.content if m.role != 'system' else '' }}")
    row = {"messages": [{"role": "system", "content": "Be brief."}, ASKED, SAID]}
    assert text_of(tokenizer, row)[2] == {"content": 1}


def test_fields_that_a_template_renders_are_not_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = THINKS
    _, learned, unused = text_of(tokenizer, {"messages": [ASKED, {**SAID, "reasoning_content": "Hm."}]})
    assert (learned, unused) == ("<think>Hm.</think>It is sunny.<|im_end|>", {})
    _, learned, unused = text_of(tokenizer, {"messages": [ASKED, {**SAID, "thinking": "Hm."}]})
    assert (learned, unused) == ("<think>Hm.</think>It is sunny.<|im_end|>", {})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_behind_the_generation_prompt_has_any_name(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    tokenizer.chat_template = chatml("{{ m.content }}") + "{% if add_generation_prompt %}<think>\n{% endif %}"
    _, learned, unused = text_of(tokenizer, {"messages": [ASKED, {**SAID, name: "The sky is blue."}]})
    assert (learned, unused) == ("The sky is blue.\n</think>\n\nIt is sunny.<|im_end|>", {})


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        (CALLING, "tool_calls"),
        ({"role": "assistant", "content": "", "reasoning_content": "Hm, the sky."}, "reasoning_content"),
    ],
)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_turn_of_which_nothing_is_rendered_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, turn: dict[str, Any], what: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=rf"f, row 1: .* renders nothing of turn 2 \({what}\), so an empty turn"):
        text_of(tokenizer, {"messages": [ASKED, turn, ASKED, SAID]})
    row = {"messages": [ASKED, {**turn, "weight": 0}, ASKED, SAID]}
    assert text_of(tokenizer, row)[1:] == ("It is sunny.<|im_end|>", {what: 1})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_that_are_marked_carry_no_loss(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    one, two = ({"role": "assistant", "content": text} for text in ("one", "two"))
    row = {"messages": [ASKED, {**one, "weight": 0}, ASKED, two]}
    assert text_of(tokenizer, row)[1] == "two<|im_end|>"
    row = {"messages": [ASKED, one, ASKED, {**two, "train": False}]}
    assert text_of(tokenizer, row)[1] == "one<|im_end|>"
    assert "'train'" not in text_of(tokenizer, row)[0]


def test_turns_that_cannot_be_told_apart_cannot_be_marked(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    row = {"messages": [ASKED, {**SAID, "weight": 0}, SAID]}
    with pytest.raises(UserError, match=r"f, row 1: some turns are not to be learned, but .* renders 2 turns"):
        text_of(tokenizer, row)


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
def test_variables_of_a_row_reach_the_template(tokenizer: PreTrainedTokenizerFast, marks: str) -> None:
    tokenizer.chat_template = chatml("{{ m.content }}", marks + "{{ style }} {{ enable_thinking }} ")
    if marks:
        tokenizer.chat_template = MARKED + "{{ style }} {{ enable_thinking }} "
    row = {"messages": [ASKED, SAID], "chat_template_kwargs": {"style": "plain"}, "enable_thinking": False}
    other = {"messages": [ASKED, SAID], "enable_thinking": True}
    tokenize = chat_tokenizer(DataConfig(train_files=["x.jsonl"]), tokenizer)
    texts = [tokenizer.decode(sample.input_ids) for sample in tokenize([(row, ""), (other, "")])[0] if sample]
    assert "plain False" in texts[0] and " True" in texts[1] and "plain" not in texts[1]


def test_preferences_have_tools_and_counts(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TOOLS
    data: Any = compose("dpo", ["model.path=m", "data.train_files=a"]).data  # type: ignore[attr-defined]
    row = {"prompt": [{**ASKED, "name": "Ann"}], "chosen": [CALLING], "rejected": "No.", "tools": [TOOL]}
    (found,), counts = preference_tokenizer(data, tokenizer)([(row, "f, row 1")])
    assert found is not None
    learned = [tokenizer.decode(sample.input_ids[sample.loss_mask]) for sample in found.samples]
    assert learned[0].startswith('<call>{"name": "look_up"') and learned[1] == "No.<|im_end|>"
    assert all('"look_up"' in tokenizer.decode(sample.input_ids) for sample in found.samples)
    assert counts.unused == {"name": 2}


def test_prompts_have_tools_variables_and_counts(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = chatml("{{ m.content or '' }}", "{{ tools | tojson }}{{ style }}")
    data = PromptDataConfig(train_files=["x"], answer_key=None, chat_template_kwargs={"style": "plain"})
    row = {"messages": [{**ASKED, "name": "Ann"}, CALLING, RESULT], "tools": [TOOL]}
    prompts, counts = prompt_tokenizer(data, tokenizer)([(row, "f, row 1")])
    assert '"look_up"' in prompts[0].text and "plain" in prompts[0].text
    assert counts.unused == {"name": 2, "tool_calls": 1, "tool_call_id": 1}
    assert str(counts).endswith("fields without effect: name (2), tool_call_id (1), tool_calls (1)")
    assert (counts + counts).unused["name"] == 4
    own = prompt_tokenizer(data, tokenizer)([({**row, "chat_template_kwargs": {"style": "fancy"}}, "")])[0]
    assert "fancy" in own[0].text
    plain = {"messages": [ASKED]}
    for tools, mine in (([TOOL], row), ([], row), ([], {**plain, "enable_thinking": True})):
        with pytest.raises(UserError, match=r"f, row 1: the row has tools or variables .* an environment"):
            prompt_tokenizer(data, tokenizer, tools)([(mine, "f, row 1")])
    assert '"look_up"' in prompt_tokenizer(data, tokenizer, [TOOL])([(plain, "")])[0][0].text


@pytest.mark.parametrize("answer_key", ["answer", "input"])
def test_columns_of_prompts_without_effect_are_counted(tokenizer: PreTrainedTokenizerFast, answer_key: str) -> None:
    tokenizer.chat_template = CHATML
    data = PromptDataConfig(train_files=["x"], answer_key=answer_key)
    row = {"messages": "What?", "answer": "5", "input": "1 2", "history": [["a", "b"]], "system": ["S"], "other": 1}
    counts = prompt_tokenizer(data, tokenizer)([(row, "f, row 1"), ({**row, "history": []}, "f, row 2")])[1]
    expected = {"input": 2, "history": 1, "system": 2}
    assert counts.unused == {name: number for name, number in expected.items() if name != answer_key}


def test_a_chat_is_rendered_again_only_if_a_field_is_not_in_its_text() -> None:
    rendered = []

    def text_of(messages: list[Any], _tools: list[Any]) -> str:
        rendered.append(messages)
        return "What? It is sunny."

    assert unused("What? It is sunny.", [ASKED, SAID], [], text_of, "") == {} and not rendered
    row = [{**ASKED, "name": "Ann", "id": "1"}, SAID]
    assert unused("What? It is sunny.", row, [], text_of, "") == {"name": 1, "id": 1}
    assert [len(messages[0]) for messages in rendered] == [4, 3, 3]  # the chat once, and without each of the fields


def test_environments_render_the_same_forms(tokenizer: PreTrainedTokenizerFast) -> None:
    template = chatml(
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    )
    text = as_text(tokenizer, template, [ASKED, CALLING], "")
    assert 'look_up{"place": "Bonn am Rhein"}' in text and "None" not in text
