"""Prompts in Arrow files."""

from __future__ import annotations

import datetime
import decimal
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.data.prompt_files import Prompts
from hpc_rl.data.prompts import Prompt
from hpc_rl.data.tokenized import Unstorable, Writer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PROMPT = st.builds(
    lambda ids, row, text: Prompt(np.array(ids, np.int32), row["a"], row, text),
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    st.fixed_dictionaries({"a": JSON, "b": JSON}),
    st.text(st.characters()),
)


def stored(path: Path, form: Prompts, *blocks: list[Prompt]) -> Any:
    with path.open("wb") as file:
        writer = Writer(file, form)
        for block in blocks:
            writer.write(block)
        writer.close()
    return form.opened([path], [writer.kept])


@settings(max_examples=60, deadline=None)
@given(blocks=st.lists(st.lists(PROMPT, max_size=4), max_size=3))
def test_prompts_are_read_as_they_were_written(blocks: list[list[Prompt]], tmp_path_factory: Any) -> None:
    found = stored(tmp_path_factory.mktemp("files") / "0", Prompts("a"), *blocks)
    expected = [prompt for block in blocks for prompt in block]
    assert len(found) == len(expected)
    for index in (*range(len(expected)), *reversed(range(len(expected)))):
        one, other = found[index], expected[index]
        assert one.token_ids.dtype == np.int32 and one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.row, one.answer, one.text) == (other.row, other.answer, other.text)


def test_without_a_column_of_answers(tmp_path: Path) -> None:
    (found,) = stored(tmp_path / "0", Prompts(None), [Prompt(np.array([1], np.int32), None, {"a": 1}, "x")])
    assert found.answer is None and found.row == {"a": 1}


@pytest.mark.parametrize(
    "value", [datetime.date(2020, 1, 2), decimal.Decimal(1), b"x", [{"deep": b"x"}], [("a", 1)], {1: 2}, math.nan]
)
def test_a_value_that_json_does_not_have(value: Any) -> None:
    row = {"a": 1, "b": value}
    with pytest.raises(Unstorable, match=r"^column 'b' has a value that JSON cannot represent$"):
        Prompts("a").columns([Prompt(np.array([1], np.int32), 1, row, "x")])


def test_other_files_are_refused(tmp_path: Path) -> None:
    stored(tmp_path / "0", Prompts("a"))
    with pytest.raises(ValueError, match="0 does not contain what it should"):
        Prompts("a").opened([tmp_path / "0"], [[1]])
