"""What is trained of rows of many shapes, with the chat templates of many families: written out in golden files.

UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.preferences import PreferenceDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.pairs import preference_tokenizer
from hpc_rl.data.prompts import prompt_tokenizer
from hpc_rl.data.sft_dataset import Sample, chat_tokenizer
from hpc_rl.data.templates.assistant_text import _overlaps, remarks
from hpc_rl.data.templates.chat import as_text, as_trained, ending_token_ids, render, template_remarks, turn_ends
from hpc_rl.data.templates.jinja_rendering import added_tokens, marks_generation
from hpc_rl.data.templates.messages import Chat
from hpc_rl.errors import UserError
from tests.data.families import FAMILIES, Family

GOLDEN = Path(__file__).with_name("golden_templates")
PAGE = Path(__file__).parents[2] / "docs" / "chat-templates.md"
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001"}
THOUGHT = "<think>\nHm.\n</think>\n\n"


def chat(*turns: str) -> list[dict[str, Any]]:
    """Messages of the user and the assistant; `s:`, `u:` and `a:` name other roles than the next one."""
    roles, messages = {"s": "system", "u": "user", "a": "assistant"}, []
    for turn in turns:
        role, _, text = turn.partition(":")
        messages.append({"role": roles[role], "content": text})
    return messages


SHAPES: dict[str, list[dict[str, Any]]] = {
    "one answer": chat("u:Q1", "a:A1"),
    "system": chat("s:Brief.", "u:Q1", "a:A1"),
    "two answers": chat("u:Q1", "a:A1", "u:Q2", "a:A2"),
    "three answers": chat("s:Brief.", "u:Q1", "a:A1", "u:Q2", "a:A2", "u:Q3", "a:A3"),
    "equal texts": chat("u:OK", "a:OK", "u:OK", "a:OK"),
    "begins with an answer": chat("a:Hello", "u:Q1", "a:A1"),
    "system, begins with an answer": chat("s:Brief.", "a:Hello", "u:Q1", "a:A1"),
    "ends with a question": chat("u:Q1", "a:A1", "u:Q2"),
    "two questions": chat("u:Q1", "u:Q2", "a:A1"),
    "two answers in a row": chat("u:Q1", "a:A1", "a:A2"),
    "empty answer": chat("u:Q1", "a:"),
    "white space": chat("u:Q1", "a: \n A1 \n\n"),
    "lines": chat("u:Q1\nQ2", "a:A1\n\nA2\n- A3"),
    "other letters": chat("u:Größe?", "a:三 é 🙂"),
    "brackets": chat("u:<b>?", "a:<i>A1</i> {x} [y] {{ z }}"),
    "thinking": chat("u:Q1", f"a:{THOUGHT}A1"),
    "thinking twice": chat("u:Q1", f"a:{THOUGHT}A1", "u:Q2", f"a:{THOUGHT}A2"),
    "reasoning_content": [*chat("u:Q1"), {"role": "assistant", "content": "A1", "reasoning_content": "Hm."}],
    "call of a tool": [*chat("u:Q1"), {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "call, result and answer": [
        *chat("u:Q1"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, *chat("a:A1"),
    ],
    "call between answers": [
        *chat("u:Q1", "a:A1", "u:Q2"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT,
        *chat("a:A2"),
    ],
}  # fmt: skip


def tokenizer_of(family: Family, trained: Tokenizer) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(trained.to_str())
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in family.special.split()])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.added.split(" ") if token])
    named = {"bos_token": family.bos} if family.bos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, **named)
    made.chat_template = family.template
    return made


def marked(tokenizer: PreTrainedTokenizerFast, sample: Sample | None) -> str:
    """The text of a sample, with marks around its targets."""
    if sample is None:
        return "dropped: nothing to learn"
    pairs = zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True)
    parts = (
        (is_target, tokenizer.decode([token for _, token in run])) for is_target, run in groupby(pairs, itemgetter(0))
    )
    return "".join(f"⟦{text}⟧" if is_target else text for is_target, text in parts)


def trained_text(family: Family, trained: Tokenizer, messages: list[dict[str, Any]]) -> dict[str, str]:
    """What sft, dpo and ppo make of a row, or why they refuse it."""

    def sft() -> str:
        tokenizer = tokenizer_of(family, trained)
        (sample,), _ = chat_tokenizer(DataConfig(train_files=["x"]), tokenizer)([({"messages": messages}, "row 1")])
        return marked(tokenizer, sample)

    def dpo() -> str:
        tokenizer, rejected = tokenizer_of(family, trained), [*messages[:-1], {"role": "assistant", "content": "No."}]
        row = {"chosen": messages, "rejected": rejected}
        (pair,), _ = preference_tokenizer(PreferenceDataConfig(train_files=["x"]), tokenizer)([(row, "row 1")])
        return " | ".join(marked(tokenizer, sample) for sample in pair.samples) if pair else "dropped"

    def ppo() -> str:
        tokenizer = tokenizer_of(family, trained)
        data = PromptDataConfig(train_files=["x"], answer_key=None)
        (prompt,), _ = prompt_tokenizer(data, tokenizer)([({"messages": messages}, "row 1")])
        return str(tokenizer.decode(prompt.token_ids))

    found = {}
    for kind in (sft, dpo, ppo):
        try:
            found[kind.__name__] = kind()
        except UserError as error:
            found[kind.__name__] = f"refused: {error}"
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_trained_text(name: str, trained: Tokenizer) -> None:
    found = {shape: trained_text(FAMILIES[name], trained, messages) for shape, messages in SHAPES.items()}
    file = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert found == json.loads(file.read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_and_its_end_are_trained_and_end_generation(name: str, trained: Tokenizer, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, trained)
    found = trained_text(family, trained, SHAPES["one answer"])
    text, own = found["sft"], found["dpo"].split(" | ")[0]
    assert text.split("⟦")[1].split("⟧")[0] == own.split("⟦")[1].split("⟧")[0] == family.answer
    ends = tokenizer.convert_ids_to_tokens(ending_token_ids(tokenizer, family.template, tmp_path))
    assert ends == list(dict.fromkeys([*family.ends.split(), family.eos]))
    if family.ends:
        assert family.answer.endswith(family.ends.split()[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_that_of_the_template(name: str, trained: Tokenizer) -> None:
    """For every conversation that is not composed of its turns: nothing is lost, and nothing but an end is added."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, trained)
    if marks_generation(family.template):
        return
    ends = turn_ends(tokenizer, family.template)
    for shape, messages in SHAPES.items():
        try:
            found = render(tokenizer, family.template, Chat(messages, shape), ends)
        except UserError:
            continue
        whole = as_text(tokenizer, family.template, messages, shape)
        answers = sum(message["role"] == "assistant" for message in messages)
        if found.is_composed:
            assert family.rewrites or "thinking" in shape or shape == "reasoning_content", shape
            assert answers > 1 or messages[-1]["role"] != "assistant" or "<think>" in family.template, shape
            continue
        assert found.text.startswith(whole) and found.text[len(whole) :] in ("", *ends.tokens), shape
        assert len(found.spans) == answers, shape


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_log_says_of_the_template(name: str, trained: Tokenizer, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, trained)
    expected = ["no special token"] if not family.ends else ["in another form"] if family.rewrites else []
    tokenizer.save_pretrained(tmp_path)
    for lines in (template_remarks(tokenizer), list(_light(tmp_path, family))):
        assert len(lines) == len(expected) and all(part in line for part, line in zip(expected, lines, strict=True))


def _light(folder: Path, family: Family) -> Iterator[str]:
    """What a login node finds without transformers."""
    named = {"eos_token": family.eos, **({"bos_token": family.bos} if family.bos else {})}
    yield from remarks(family.template, added_tokens(folder), named)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stored_tokens(name: str, trained: Tokenizer) -> None:
    family = FAMILIES[name]

    class Model:
        """A model's settings."""

        class config:
            eos_token_id: Any = 0
            pad_token_id: Any = None

            @classmethod
            def get_text_config(cls) -> Any:
                return cls

    tokenizer = as_trained(tokenizer_of(family, trained), Model)  # type: ignore[arg-type]
    listed = Model.config.eos_token_id
    ends = tokenizer.convert_ids_to_tokens(listed if isinstance(listed, list) else [listed])
    assert set(ends) == {*family.ends.split(), family.eos}
    assert tokenizer.pad_token_id == Model.config.pad_token_id is not None
    assert tokenizer.pad_token not in family.ends.split() or name in ("olmo2", "hunyuan")
    kept = "eos_token" in family.template or not family.ends
    assert tokenizer.eos_token == (family.eos if kept else family.ends.split()[0])
    for messages in (SHAPES["one answer"], SHAPES["two answers"]):
        assert tokenizer.apply_chat_template(messages, tokenize=False) == tokenizer_of(
            family, trained
        ).apply_chat_template(messages, tokenize=False)


@given(st.text("ab\0"), st.text("ab\0"))
def test_overlaps(one: str, other: str) -> None:
    expected = [number for number in range(len(other), -1, -1) if one.endswith(other[:number])]
    assert list(_overlaps(one, other)) == expected


def test_the_page_shows_the_table() -> None:
    """docs/chat-templates.md has what the golden files have."""
    lines = ["| family | trained text of one answer | a response ends at | earlier turns | refused shapes of rows |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, family in FAMILIES.items():
        golden = json.loads((GOLDEN / f"{name}.json").read_text())
        refused = [shape for shape, found in golden.items() if found["sft"].startswith("refused")]
        ends = " ".join(f"`{token}`" for token in family.ends.split()) or "the tokenizer's own token"
        earlier = "as if they were the last" if family.rewrites else "as the template has them"
        trained_one = json.dumps(family.answer, ensure_ascii=False)[1:-1]
        cells = [name, f"`{trained_one}`", ends, earlier, "; ".join(refused) or "none"]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    begin, end = "<!-- table of families -->\n", "\n<!-- end of the table -->"
    before, _, rest = PAGE.read_text().partition(begin)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{begin}" + "\n".join(lines) + f"{end}{rest.partition(end)[2]}")
    assert PAGE.read_text().partition(begin)[2].partition(end)[0] == "\n".join(lines)
