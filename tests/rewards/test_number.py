from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from hpc_rl.rewards.number import required_text, split_reward, to_score


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5), Fraction(1, 2)])
def test_a_number_is_a_score_without_components(value: object) -> None:
    assert split_reward(value) == (0.5, {})


def test_further_numbers_of_a_dict_are_components() -> None:
    value = {"score": 1, "format": True, "length": np.int64(7), "text": "12", "none": None, "nan": float("nan"), 3: 4.0}
    assert split_reward(value) == (1.0, {"format": 1.0, "length": 7.0, "3": 4.0})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"reward": 1.0, "format": 0.0},
            'expected a number or a dict with the key "score", got a dict with reward, format',
        ),
        ({}, "got a dict with no keys"),
        ({"score": "1"}, "expected a number, got text: '1'"),
        ({"score": None}, "expected a number, got NoneType"),
        ({"score": float("inf")}, "expected a finite number, got inf"),
        ([1.0, 2.0], "expected a number, got list"),
        (3.5e38, "expected a finite number"),
    ],
)
def test_what_is_not_a_score(value: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_reward(value)
    assert message in str(caught.value)


def test_the_largest_float32_is_a_score() -> None:
    assert to_score(3.4028234663852886e38) == 3.4028234663852886e38


def test_a_missing_answer_names_the_option() -> None:
    assert required_text(12) == "12"
    with pytest.raises(ValueError, match=r"set data\.answer_key"):
        required_text(None)
