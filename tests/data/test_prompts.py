from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.data.prompts import Prompt, PromptCounts, prompt_tokenizer
from hpc_rl.data.reading.row_checks import check_file
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.errors import UserError

DATA = PromptDataConfig(train_files=["unused.jsonl"])
ASKED = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "What is 7 + 5?"}]
TEXT = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"


def rows_file(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def config(**options: Any) -> PromptDataConfig:
    return PromptDataConfig(train_files=["unused.jsonl"], **options)


def load(
    files: list[str], data: PromptDataConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[Prompt], PromptCounts]:
    return prompt_tokenizer(data, tokenizer)(all_rows(files, "train"))


def test_text_or_chat(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [
        {"messages": "What is 7 + 5?", "answer": "12"},
        {"messages": [ASKED[1]], "answer": 12, "level": 3},
        {"messages": [ASKED[1], {"role": "assistant", "content": "12"}], "answer": ["12"]},
    ]
    prompts, counts = load([rows_file(tmp_path, *rows)], DATA, tokenizer)
    assert [prompt.text for prompt in prompts] == [TEXT] * 3
    assert [prompt.answer for prompt in prompts] == ["12", 12, ["12"]] and [prompt.row for prompt in prompts] == rows
    assert all(tokenizer.decode(prompt.token_ids) == TEXT for prompt in prompts)
    assert prompts[0].token_ids.dtype == np.int32
    assert counts == PromptCounts(rows=3, tokens=3 * len(prompts[0].token_ids))


def test_earlier_turns_and_the_system_stay(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "12"}
    file = rows_file(tmp_path, {"messages": [*ASKED, turn, ASKED[1], turn]})
    ((prompt,), _) = load([file], config(answer_key=None), tokenizer)
    assert prompt.answer is None and prompt.text.count("assistant") == 2 and prompt.text.count("Be brief") == 1
    assert prompt.text.endswith("<|im_start|>assistant\n")


def test_long_prompts_are_dropped_or_keep_their_end(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = rows_file(tmp_path, {"messages": "7?", "answer": "7"}, {"messages": "What " * 50, "answer": "?"})
    prompts, counts = load([file], config(max_prompt_length=30), tokenizer)
    assert [prompt.answer for prompt in prompts] == ["7"] and (counts.rows, counts.dropped) == (2, 1)
    assert str(counts).endswith("; 1 too long, dropped")
    cut = config(max_prompt_length=30, overlong_prompts="truncate")
    prompts, counts = load([file], cut, tokenizer)
    assert len(prompts[1].token_ids) == 30 and (counts.truncated, counts.dropped) == (1, 0)
    assert tokenizer.decode(prompts[1].token_ids).endswith("What <|im_end|>\n<|im_start|>assistant\n")
    assert counts.shortest == len(prompts[0].token_ids)


@pytest.mark.parametrize(
    ("row", "data", "parts"),
    [
        ({"mesages": "a", "answer": "b"}, DATA, ["'messages'", "did you mean data.prompt_key=mesages"]),
        (
            {"messages": "a", "anser": "b"},
            DATA,
            ["no column 'answer' (data.answer_key)", "did you mean data.answer_key=anser"],
        ),
        ({"messages": "a", "answer": None}, DATA, ["'answer' has null", "data.answer_key=null"]),
        ({"messages": 3, "answer": "b"}, DATA, ["a number"]),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "b"}, DATA, ["there is no prompt"]),
        ({"messages": [{"role": "user"}], "answer": "b"}, DATA, ["no text in `content`"]),
        ({"question": "a"}, config(prompt_key="question"), ["no column 'answer'"]),
    ],
)
def test_a_bad_row_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, Any], data: PromptDataConfig, parts: list[str]
) -> None:
    file = rows_file(tmp_path, {"messages": "7?", "question": "7?", "answer": "7"}, row)
    for call in (lambda: check_file(file, data), lambda: load([file], data, tokenizer)):
        with pytest.raises(UserError) as caught:
            call()
        assert all(part in str(caught.value) for part in [*parts, "rows.jsonl, row 2"]), str(caught.value)
        assert "\n" not in str(caught.value)


def test_templates(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = rows_file(tmp_path, {"messages": ASKED, "answer": "7"})
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }} =")
    ((prompt,), _) = load([file], config(chat_template=str(tmp_path / "own.jinja")), tokenizer)
    assert prompt.text == "What is 7 + 5? ="
    for template, message in (("{{ raise_exception('no') }}", "row 1: the chat template rejects"), (" ", "row 1")):
        tokenizer.chat_template = template if template.strip() else "{% if x %}x{% endif %}"
        with pytest.raises(UserError, match=message):
            load([file], DATA, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        load([file], DATA, tokenizer)
