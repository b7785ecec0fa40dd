"""What makes two tokenizers different."""

from __future__ import annotations

import pytest

from hpc_rl.formats.vocabulary import other_special_tokens, role_difference, vocabulary_difference


def test_the_first_token_that_differs_is_named_with_both_numbers() -> None:
    ours = {"a": 0, "b": 1, "c": 2}
    assert vocabulary_difference(dict(ours), ours) is None
    found = vocabulary_difference({"a": 0, "b": 2, "c": 1}, ours)
    assert found == "2 tokens differ, for example 'b', which is 2 and 1"
    assert vocabulary_difference({"a": 0, "b": 1}, ours) == "1 token differs, for example 'c', which is missing and 2"
    assert vocabulary_difference({**ours, "d": 3}, ours) == "1 token differs, for example 'd', which is 3 and missing"


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "unk_token"])
def test_a_role_that_other_tokens_have(role: str) -> None:
    assert role_difference({role: "<a>"}, {role: "<b>"}) == f"{role} is '<a>' and '<b>'"
    assert role_difference({role: None}, {role: "<b>"}) == f"{role} is None and '<b>'"
    assert role_difference({role: "<a>"}, {role: "<a>"}) is None


def test_only_roles_that_both_name_are_compared() -> None:
    assert role_difference({"eos_token": "<a>"}, {"bos_token": "<b>"}) is None
    assert role_difference({"pad_token": "<a>"}, {"pad_token": "<b>"}) is None, "nothing is padded"


def test_the_error_names_the_remedy() -> None:
    found = other_special_tokens("teacher.path", "large", "small", "eos_token is '<a>' and '<b>'")
    assert found.startswith("teacher.path large and model.path small have different special tokens: eos_token is '<a>'")
    assert found.endswith("model.tokenizer_path=large")
