"""Rows of preferences: their forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hpc_rl.config.training.preferences import PreferenceDataConfig, RewardDataConfig
from hpc_rl.data.reading.preference_rows import LabelledRow, PairRow, to_preference
from hpc_rl.errors import UserError

USER = {"role": "user", "content": "?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in "+-")
DPO = PreferenceDataConfig(train_files=["unused"])
RM = RewardDataConfig(train_files=["unused"])


def data(kind: type[PreferenceDataConfig] = PreferenceDataConfig, **options: Any) -> Any:
    return kind(train_files=["unused"], **options)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "chosen": "+", "rejected": "-"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": "-"},
        {"prompt": "?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["text", "messages", "whole chats and a prompt", "whole chats"],
)
def test_every_form_is_the_same_pair(row: dict[str, Any]) -> None:
    assert to_preference(row, DPO, "row 1") == PairRow([USER, GOOD], [USER, BAD], common=1)


def test_later_turns_belong_to_the_prompt_until_the_chats_differ() -> None:
    pair = to_preference({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, DPO, "row 1")
    assert isinstance(pair, PairRow) and pair.common == 3 and not pair.is_equal


def test_equal_chats_are_a_valid_row() -> None:
    pair = to_preference({"prompt": "?", "chosen": "+", "rejected": "+"}, DPO, "row 1")
    assert isinstance(pair, PairRow) and pair.is_equal


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "chosen": "+"}, "no column 'rejected' (data.rejected_key); columns: chosen, prompt"),
        ({"prompt": "?", "preferred": "+", "rejected": "-"}, "set data.chosen_key=preferred"),
        ({"turns": [USER, GOOD]}, "found one chat (column turns) where a pair of responses is needed; chats are for"),
        ({"turns": [USER]}, "no column 'chosen' (data.chosen_key); columns: turns"),
        ({"prompt": [USER], "response": "+"}, "no column 'chosen' (data.chosen_key); columns: prompt, response"),
        ({"question": "?", "chosen": "+", "rejected": "-"}, "set data.prompt_key=question"),
        ({"prompt": [USER, GOOD], "chosen": "+", "rejected": "-"}, "the columns may be swapped"),
        ({"prompt": "+", "chosen": [USER], "rejected": [USER]}, "'chosen' ends with a turn of the user"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "!"}, BAD]}, "begin with different messages"),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, {**USER, "content": "!"}, BAD]},
            "after 2 messages that both chats have, 'chosen' goes on with a turn of the user",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, BAD]}, "'chosen' ends there"),
        ({"prompt": "?", "chosen": 3, "rejected": "-"}, "'chosen' has a number; text or a list of messages is needed"),
    ],
)
def test_what_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        to_preference(row, DPO, "f.jsonl, row 7")
    assert str(error.value).startswith("f.jsonl, row 7: ") and message in str(error.value)


@pytest.mark.parametrize(
    "options",
    [{"chosen_key": "rejected", "rejected_key": "chosen"}, {"chosen_key": "rejected"}, {"rejected_key": "chosen"}],
)
def test_swapped_columns_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"swapped|name two columns"):
        data(**options)


def test_margins() -> None:
    row = {"prompt": "?", "chosen": "+", "rejected": "-", "margin": "1.5"}
    found = to_preference(row, data(RewardDataConfig, margin_key="margin"), "row 1")
    assert isinstance(found, PairRow) and found.margin == 1.5
    assert to_preference(row, RM, "row 1") == PairRow([USER, GOOD], [USER, BAD], 1, 0.0)
    with pytest.raises(UserError, match="column 'margin' has null; a finite number"):
        to_preference({**row, "margin": None}, data(RewardDataConfig, margin_key="margin"), "row 1")


@pytest.mark.parametrize(("value", "label"), [(True, 1.0), (False, 0.0), (1, 1.0), ("True", 1.0), ("0", 0.0)])
def test_labels(value: Any, label: float) -> None:
    row = {"prompt": "?", "response": "+", "label": value}
    assert to_preference(row, data(label_key="label"), "row 1") == LabelledRow([USER, GOOD], (label,))


def test_only_reward_models_learn_any_number() -> None:
    row = {"prompt": "?", "completion": "+", "label": 0.25}
    keys = {"label_key": "label", "response_key": "completion"}
    assert to_preference(row, data(RewardDataConfig, **keys), "row 1") == LabelledRow([USER, GOOD], (0.25,))
    with pytest.raises(UserError, match=r"column 'label' has 0.25; a label is true or false"):
        to_preference(row, data(**keys), "row 1")
    with pytest.raises(UserError, match=r"set data.response_key=completion"):
        to_preference(row, data(label_key="label"), "row 1")
    with pytest.raises(UserError, match="column 'label' has 'good'; a finite number"):
        to_preference({**row, "label": "good"}, data(**keys), "row 1")
