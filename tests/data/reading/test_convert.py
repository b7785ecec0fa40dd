"""Shapes of public data sets: what each becomes, what proposes the conversion, and the table in the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from hpc_rl.cli.app import app
from hpc_rl.config.compose import compose
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.convert import convert
from hpc_rl.data.reading.formats import read_rows
from hpc_rl.data.reading.row_checks import check_row
from hpc_rl.data.reading.rows import to_messages
from hpc_rl.data.reading.shapes import SHAPES, shape_of
from hpc_rl.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "sft.md"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TURNS = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!", "weight": 0}]
CALLED = [
    {"from": "system", "value": "S"},
    {"from": "user", "value": "?"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    {"from": "observation", "value": "1"},
    {"from": "assistant", "value": "!"},
]
RATED = [{"response": "a", "overall_score": 2}, {"response": "b", "overall_score": 7.5}, {"response": "c"}]
HH = "\n\nHuman: What?\n\nAssistant: Hm.\n\nHuman: And?\n\nAssistant: "

EXAMPLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sharegpt", {"conversations": [*TURNS, *TURNS[:1], {"from": "gpt", "value": "x"}], "id": 1},
     {"messages": [user("?"), said("!", weight=0), user("?"), said("x")], "id": 1}),
    ("sharegpt", {"conversations": CALLED, "tools": "[]", "system": ""},
     {"messages": [{"role": "system", "content": "S"}, user("?"),
                   {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]},
                   {"role": "tool", "content": "1"}, said("!")], "tools": "[]", "system": ""}),
    ("sharegpt", {"messages": [*TURNS[:1], {"from": "gpt", "value": "!"}]}, {"messages": [user("?"), said("!")]}),
    ("sharegpt-pair", {"conversations": TURNS[:1], "chosen": {"from": "gpt", "value": "a"},
                       "rejected": {"from": "gpt", "value": "b"}},
     {"prompt": [user("?")], "chosen": [said("a")], "rejected": [said("b")]}),
    ("sharegpt-label", {"conversations": TURNS, "kto_tag": True},
     {"response": [user("?"), said("!", weight=0)], "label": True}),
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, {"messages": [user("Add.\n\n1 2"), said("3")]}),
    ("alpaca", {"instruction": "Hi.", "input": "", "output": "Ho.", "system": "S", "history": [["a", "b"]]},
     {"messages": [user("a"), said("b", train=False), user("Hi."), said("Ho.")], "system": "S"}),
    ("alpaca", {"instruction": "Sum.", "context": "Text.", "response": "T.", "category": "c"},
     {"messages": [user("Sum.\n\nText."), said("T.")], "category": "c"}),
    ("hh", {"chosen": HH + "Good.", "rejected": HH + "Bad."},
     {"prompt": [user("What?"), said("Hm."), user("And?")], "chosen": [said("Good.")], "rejected": [said("Bad.")]}),
    ("kto", {"prompt": "?", "completion": "!", "label": False}, {"prompt": "?", "response": "!", "label": False}),
    ("kto", {"prompt": [user("?")], "completion": [said("!")], "label": True},
     {"prompt": [user("?")], "response": [said("!")], "label": True}),
    ("ultrafeedback", {"source": "s", "instruction": "?", "completions": RATED},
     {"prompt": "?", "chosen": "b", "rejected": "a", "margin": 5.5, "source": "s"}),
    ("prompt-completion", {"prompt": "?", "completion": "!"}, {"messages": [user("?"), said("!")]}),
    ("prompt-completion", {"prompt": [user("a"), said("b"), user("c")], "completion": [said("d")]},
     {"messages": [user("a"), said("b", train=False), user("c"), said("d")]}),
    ("verl", {"data_source": "x/gsm8k", "prompt": [user("?")], "ability": "math",
              "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}},
     {"messages": [user("?")], "answer": "4", "data_source": "x/gsm8k", "ability": "math",
      "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}}),
    ("openai-preference", {"input": {"messages": [user("?")], "tools": [], "parallel_tool_calls": True},
                           "preferred_output": [said("a")], "non_preferred_output": [said("b")]},
     {"prompt": [user("?")], "chosen": [said("a")], "rejected": [said("b")], "tools": [], "parallel_tool_calls": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "expected"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_rows_become(
    tmp_path: Path, suffix: str, name: str, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    file, output = tmp_path / f"in{suffix}", tmp_path / "out.jsonl"
    if suffix == ".jsonl":
        file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    else:
        parquet.write_table(pa.Table.from_pylist([row, row]), file)
    found = convert(str(file), output)
    assert (found.rows, found.name) == (2, name)
    assert list(read_rows(output)) == [expected, expected]


def test_every_shape_has_an_example() -> None:
    assert {name for name, *_ in EXAMPLES} == set(SHAPES)


@pytest.mark.parametrize(("name", "row", "expected"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
def test_training_proposes_the_conversion_and_reads_its_result(
    name: str, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    shape = SHAPES[name]
    unread = {"ppo": ["reward.function=exact"]}.get(shape.kind, [])
    config: Any = compose(shape.kind, ["model.path=m", "data.train_files=a", *shape.options.split(), *unread])
    check_row(expected, config.data, "f, row 1")
    if name == "prompt-completion":
        return
    for kind in ("sft", shape.kind):
        refusing: Any = compose(kind, ["model.path=m", "data.train_files=a", *({"ppo": unread}.get(kind, []))])
        with pytest.raises(UserError, match=r"hpc-rl data convert FILE --output NEW\.jsonl"):
            check_row(row, refusing.data, "f, row 1")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([{"text": "x"}], ["row 1: none of the shapes verl, ", "has the columns text"]),
        ([{"instruction": "a", "input": "", "output": "b"}, {"text": "x"}],
         ["row 2: the shape alpaca has", "columns text"]),
        ([{"conversations": [{"from": "alien", "value": "x"}]}], ["row 1: a turn is not", "human", "(shape sharegpt)"]),
        ([{"conversations": [{"from": "function_call", "value": "x"}]}], ["a turn of function_call is no JSON"]),
        ([{"conversations": [{"from": "human", "value": "x"}]}], ["nothing to learn from any row (shape sharegpt)"]),
        ([{"instruction": "a", "completions": RATED[:1]}], ["fewer than two `completions`"]),
        ([{"instruction": "a", "completions": RATED[:1] * 2}], ["nothing to learn from any row"]),
        ([{"instruction": "", "input": "", "output": "b"}], ["one of them not empty"]),
        ([{"prompt": 3, "completion": "x"}], ["`prompt` has a number"]),
        ([{"prompt": ["a"], "completion": "x"}], ["row 1, converted: message 1 of 'messages' is not of the form"]),
        ([{"conversations": [{"from": ["human"], "value": "x"}]}], ["row 1: a turn is not"]),
        ([{"instruction": "a", "completions": [{"overall_score": 1}, {"overall_score": 2}]}], ["'chosen' has null"]),
        ([], ["in.jsonl"]),
        ([{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"}],
         ["row 1, converted"]),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_converted(tmp_path: Path, rows: list[dict[str, Any]], parts: list[str]) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as caught:
        convert(str(file), output)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value) and not output.exists()


def test_a_pair_without_a_better_answer_is_left_out(tmp_path: Path) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"instruction": "?", "completions": found} for found in (RATED, RATED[:1] * 2, RATED)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = convert(str(file), output)
    assert (found.rows, found.left_out) == (2, 1) and len(output.read_text().splitlines()) == 2


@pytest.mark.parametrize("first", [[], TURNS[:1], [{"from": "system", "value": "S"}]])
def test_a_chat_in_which_nobody_answers_is_left_out(tmp_path: Path, first: list[Any]) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in (first, TURNS, [])))
    found = convert(str(file), output)
    assert (found.name, found.rows, found.left_out) == ("sharegpt", 1, 2)
    file.write_text(json.dumps({"conversations": first}) + "\n")
    with pytest.raises(UserError, match="there is nothing to learn from any row"):
        convert(str(file), output)


def test_the_ground_truth_takes_precedence() -> None:
    row = {"data_source": "d", "prompt": "?", "reward_model": {"ground_truth": "1"}, "answer": "2"}
    assert SHAPES["verl"].convert(row)["answer"] == "1"


def test_the_command(tmp_path: Path) -> None:
    file, output = tmp_path / "in.json", tmp_path / "out.jsonl"
    file.write_text(json.dumps([EXAMPLES[9][1]]))
    words = ["data", "convert", str(file), "--output", f"$FOLDER/{output.name}"]
    found = CliRunner(env={"FOLDER": str(tmp_path)}).invoke(app, words)
    assert found.exit_code == 0 and found.stdout == (
        f"{output}: 1 row of the shape kto\n"
        f"To train: hpc-rl submit dpo data.train_files={output} data.label_key=label algorithm.loss=kto\n"
    )
    for arguments, part in ((["--shape", "x"], "choose one of"), ([], "name a file that ends in .jsonl")):
        found = CliRunner().invoke(app, ["data", "convert", str(file), "--output", str(tmp_path / "o.csv"), *arguments])
        assert isinstance(found.exception, UserError) and part in str(found.exception)
    with pytest.raises(UserError, match="is the file that is read"):
        (tmp_path / "same.jsonl").write_text("{}\n")
        convert(str(tmp_path / "same.jsonl"), tmp_path / "same.jsonl")


def test_alpaca_can_be_read_with_options_if_no_input_is_lost() -> None:
    data = DataConfig(train_files=["x"], prompt_key="instruction", response_key="output")
    assert to_messages({"instruction": "a", "input": "", "output": "b"}, data, "") == [user("a"), said("b")]
    assert shape_of({"question": "a", "answer": "b"}) is None


def test_the_table_in_the_documentation() -> None:
    lines = [f"| `{name}` | {one.columns} | {one.becomes} | `{one.kind}` |" for name, one in SHAPES.items()]
    assert "\n".join(lines) in PAGE.read_text(), "docs/sft.md lacks these lines:\n" + "\n".join(lines)
