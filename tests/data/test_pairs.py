"""Preferences as tokens: targets, what is dropped, and mismatched responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.training.preferences import PreferenceDataConfig
from hpc_rl.data.mismatched import Mismatched
from hpc_rl.data.pairs import Preference, preference_tokenizer
from hpc_rl.data.sft_dataset import Sample
from tests.data.conftest import CHATML, MARKED


def data(**options: Any) -> PreferenceDataConfig:
    return PreferenceDataConfig(train_files=["unused"], **options)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def tokenized(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], **options: Any) -> Any:
    placed = [(row, f"row {number}") for number, row in enumerate(rows, start=1)]
    return preference_tokenizer(data(**options), tokenizer)(placed)


def targets(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> str:
    return tokenizer.decode(sample.input_ids[sample.loss_mask])


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["rendered", "marked"])
def test_the_targets_are_the_responses(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    before = [turn("user", "What?"), turn("assistant", "The answer."), turn("user", "And?")]
    rows = [
        {"prompt": "What is 7 + 5?", "chosen": "twelve", "rejected": "The answer is 7."},
        {"chosen": [*before, turn("assistant", "The 5.")], "rejected": [*before, turn("assistant", "The 7.")]},
    ]
    (first, second), counts = tokenized(tokenizer, rows)
    found = [targets(tokenizer, sample) for sample in first.samples]
    assert found == ["twelve<|im_end|>", "The answer is 7.<|im_end|>"]
    # Equal words at the beginning of both responses are targets, and earlier turns of the assistant are not.
    assert [targets(tokenizer, sample) for sample in second.samples] == ["The 5.<|im_end|>", "The 7.<|im_end|>"]
    for sample in (*first.samples, *second.samples):
        assert sample.loss_mask[-1], "a sample ends with the end-of-turn token"
    assert tokenizer.decode(second.samples[0].input_ids).startswith("<|im_start|>user\nWhat?<|im_end|>")
    assert (counts.rows, counts.tokens) == (2, sum(len(s.input_ids) for p in (first, second) for s in p.samples))
    assert counts.target_tokens == sum(int(s.loss_mask.sum()) for p in (first, second) for s in p.samples)


def test_what_is_dropped_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c" * 60},
        {"prompt": "a", "chosen": "c" * 60, "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    found, counts = tokenized(tokenizer, rows, max_length=40)
    assert [one is None for one in found] == [True, True, True, False]
    assert (counts.rows, counts.equal, counts.dropped) == (4, 1, 2)
    assert "1 with equal responses, dropped" in str(counts) and "2 too long, dropped" in str(counts)


def test_a_label_belongs_to_one_sample(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "What?", "response": "twelve", "label": label} for label in (True, False)]
    found, _ = tokenized(tokenizer, rows, label_key="label")
    assert [(len(one.samples), one.values) for one in found] == [(1, (1.0,)), (1, (0.0,))]
    assert targets(tokenizer, found[0].samples[0]) == "twelve<|im_end|>"


def labelled(prompt: list[int], response: list[int]) -> Preference:
    mask = np.arange(len(prompt) + len(response)) >= len(prompt)
    return Preference((Sample(np.array(prompt + response, np.int32), mask),), 1.0)


def test_a_mismatched_sample_has_the_next_rows_response() -> None:
    own = [labelled([1, 2], [3]), labelled([4], [5, 6, 7]), labelled([8, 9, 10], [11])]
    found = Mismatched(own, max_length=4)
    assert [one.samples[0] is other.samples[0] for one, other in zip(found, own, strict=True)] == [True] * 3
    assert [one.samples[1].input_ids.tolist() for one in found] == [[1, 2, 5, 6], [4, 11], [8, 9, 10, 3]]
    assert [one.samples[1].loss_mask.tolist() for one in found] == [
        [False, False, True, True],
        [False, True],
        [False, False, False, True],
    ]


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [
        ([1, 1, 2, 2, 2, 3], [30, 30, 60, 60, 60, 10]),
        ([1, 2, 2, 1], [20, 40, 40, 20]),  # the first row follows the last one
        ([1, 1, 1], [20, 30, 10]),  # there is no other prompt
        ([1], [10]),
    ],
)
def test_a_mismatched_response_answers_another_prompt(prompts: list[int], answers: list[int]) -> None:
    rows = [labelled([prompt], [10 * number]) for number, prompt in enumerate(prompts, start=1)]
    found = [one.samples[1].input_ids.tolist() for one in Mismatched(rows, max_length=9)]
    assert found == [list(pair) for pair in zip(prompts, answers, strict=True)]
