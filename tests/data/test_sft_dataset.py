from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.sources import all_rows, blocks
from hpc_rl.data.sft_dataset import Counts, Sample, chat_tokenizer
from hpc_rl.errors import UserError
from tests.data.conftest import CHATML, MARKED


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": ([{"role": "system", "content": system}] if system is not None else []) + messages}


def rows_file(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def tokenize(
    files: list[str], data: DataConfig, tokenizer: PreTrainedTokenizerFast, split: str = "train"
) -> tuple[list[Sample | None], Counts]:
    return chat_tokenizer(data, tokenizer)(all_rows(files, split))


def targets(tokenizer: PreTrainedTokenizerFast, sample: Sample | None) -> str:
    assert sample is not None
    return str(tokenizer.decode(sample.input_ids[sample.loss_mask], clean_up_tokenization_spaces=False))


def one(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], data: DataConfig, folder: Path) -> Sample | None:
    return tokenize([rows_file(folder, [row])], data, tokenizer)[0][0]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_assistant_turn_with_its_end_is_a_target(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path, template: str
) -> None:
    tokenizer.chat_template = template
    sample = one(tokenizer, chat("What?", "twelve é", "And?", "13\n", system="Be brief"), data, tmp_path)
    assert targets(tokenizer, sample) == "twelve é<|im_end|>13\n<|im_end|>"
    assert sample is not None and sample.input_ids.dtype == np.int32 and not sample.loss_mask[0]
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=2, max_size=6))
def test_marked_and_derived_targets_agree(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path, texts: list[str]
) -> None:
    row = chat(*texts)
    samples = []
    for template in (CHATML, MARKED):
        tokenizer.chat_template = template
        samples.append(one(tokenizer, row, data, tmp_path))
    derived, marked = samples
    assert derived is not None and marked is not None
    np.testing.assert_array_equal(derived.input_ids, marked.input_ids)
    np.testing.assert_array_equal(derived.loss_mask, marked.loss_mask)
    assert targets(tokenizer, derived).count("<|im_end|>") == len(texts) // 2


def test_a_turn_may_end_in_plain_whitespace(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}"
    )
    sample = one(tokenizer, chat("7 + 5", "answer", "9", "answer"), data, tmp_path)
    # " answer" is one token: it crosses the border and is a target.
    assert targets(tokenizer, sample) == " answer\n\n answer\n\n"


def test_truncation_and_dropping_are_counted(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = rows_file(tmp_path, [chat("What?", "12"), chat("What?", "12 " * 40), chat("What? " * 40, "12")])
    cut = DataConfig(train_files=[file], max_length=30)
    samples, counts = tokenize([file], cut, tokenizer)
    kept = [sample for sample in samples if sample is not None]
    assert [sample is None for sample in samples] == [False, False, True]
    assert len(kept[1].input_ids) == 30 and kept[1].loss_mask[-1]
    tokens = sum(len(s.input_ids) for s in kept)
    hit = sum(int(s.loss_mask.sum()) for s in kept)
    assert counts == Counts(rows=3, tokens=tokens, target_tokens=hit, truncated=1, no_target=1)
    assert "1 truncated" in str(counts) and "1 no target left" in str(counts)
    samples, counts = tokenize([file], cut.model_copy(update={"truncation": "drop"}), tokenizer)
    assert [sample is None for sample in samples] == [False, True, True] and counts.dropped == 2


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_make_up_the_whole(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path, parts: int
) -> None:
    files = [rows_file(tmp_path, [chat(f"{i}?", str(i)) for i in range(n)], f"{n}.jsonl") for n in (600, 5)]
    whole, total = tokenize(files, data, tokenizer)
    read = chat_tokenizer(data, tokenizer)
    shares = [[read(block) for block in blocks(files, "train", part, parts)] for part in range(parts)]
    assert sum((counts for share in shares for _, counts in share), Counts()) == total
    assert [len(share) for share in shares] == [len(range(part, 3, parts)) for part in range(parts)]
    joined = [sample for block in range(3) for sample in shares[block % parts][block // parts][0]]
    for sample, found in zip(whole, joined, strict=True):
        assert sample is not None and found is not None
        np.testing.assert_array_equal(sample.input_ids, found.input_ids)


def test_no_template(tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"data\.chat_template"):
        one(tokenizer, chat("a", "b"), data, tmp_path)
    (tmp_path / "chatml.jinja").write_text(MARKED)
    given = data.model_copy(update={"chat_template": str(tmp_path / "chatml.jinja")})
    assert targets(tokenizer, one(tokenizer, chat("a", "b"), given, tmp_path)) == "b<|im_end|>"
    with pytest.raises(UserError, match="cannot read"):
        one(tokenizer, chat("a", "b"), data.model_copy(update={"chat_template": "no.jinja"}), tmp_path)


def test_a_template_that_rewrites_earlier_turns(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path
) -> None:
    thought = "{{ '<think></think>' if loop.last and m.role == 'assistant' }}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", thought + "{{ m.content }}")
    assert targets(tokenizer, one(tokenizer, chat("a", "b"), data, tmp_path)) == "<think></think>b<|im_end|>"
    sample = one(tokenizer, chat("a", "b", "c", "d"), data, tmp_path)
    assert targets(tokenizer, sample) == "<think></think>b<|im_end|><think></think>d<|im_end|>"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ 'Brief. ' if loop.last }}{{ m.content }}")
    with pytest.raises(UserError, match=r"row 1: the chat template renders what precedes turn 2.*generation"):
        one(tokenizer, chat("a", "b"), data, tmp_path)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_template_that_refuses(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path, template: str
) -> None:
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
        template
    )
    with pytest.raises(UserError, match=r"row 1.*no system"):
        one(tokenizer, chat("a", "b", system="s"), data, tmp_path)


def test_errors_name_file_and_row(tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl, row 1: no assistant turn"):
        one(tokenizer, chat("alone"), data, tmp_path)
    with pytest.raises(UserError, match="empty"):
        tokenize([rows_file(tmp_path, [])], data, tokenizer)
