from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data import arithmetic, gsm8k
from hpc_rl.data.reading.formats import read_rows
from hpc_rl.data.reading.row_checks import check_file
from hpc_rl.environments.calculator import Calculator
from hpc_rl.environments.tool_calls import ToolCall, parse_hermes
from hpc_rl.errors import UserError

RAW = {"question": "Two boxes of 600 nails?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}


def raw_folder(path: Path) -> Path:
    path.mkdir()
    for name, rows in (("train", 3), ("test", 2)):
        (path / f"{name}.jsonl").write_text((json.dumps(RAW) + "\n") * rows)
    return path


def test_gsm8k_folder(tmp_path: Path, data: DataConfig) -> None:
    out = tmp_path / "out"
    assert gsm8k.prepare(str(raw_folder(tmp_path / "raw")), out) == {"train": 3, "test": 2}
    row = next(read_rows(out / "test.jsonl"))
    assert row["answer"] == "1200"
    assert [m["content"] for m in row["messages"]] == [RAW["question"], RAW["answer"]]
    assert check_file(str(out / "train.jsonl"), data) == 3
    assert sorted(p.name for p in out.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_gsm8k_from_a_datasets_folder(tmp_path: Path) -> None:
    """Without a network, `datasets` builds a data set from a folder."""
    raw = raw_folder(tmp_path / "raw")
    for name in ("train", "test"):
        (raw / f"{name}.jsonl").rename(raw / f"{name}.json")
    from hpc_rl.data.reading.hub import load_split

    assert [row["question"] for row in load_split(str(raw), "test")] == [RAW["question"]] * 2
    with pytest.raises(UserError, match="no split 'validation'; it has train, test"):
        load_split(str(raw), "validation")


@pytest.mark.parametrize(
    ("row", "message"),
    [({"question": "x"}, "row 1: not a GSM8K row"), ({"question": "x", "answer": "no mark"}, "after ####")],
)
def test_gsm8k_bad_rows_leave_nothing_behind(tmp_path: Path, row: dict[str, str], message: str) -> None:
    (tmp_path / "some.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        gsm8k.prepare(str(tmp_path / "some.jsonl"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_datasets_the_error_names_a_command_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        gsm8k.prepare("openai/gsm8k:main", tmp_path / "out")
    first, command, last = str(caught.value).splitlines()
    assert first == f"cannot load the data set 'openai/gsm8k:main': {sys.executable} has no datasets; install it with"
    program, *arguments, requirement = shlex.split(command)
    assert (program, arguments[:3]) == (sys.executable, ["-m", "pip", "install"])
    folder, extra = requirement.removesuffix("]").split("[")
    assert (Path(folder) / "setup.cfg").is_file() and extra == "train"
    assert "instead of the name" in last


def test_gsm8k_never_overwrites_its_source(tmp_path: Path) -> None:
    raw = raw_folder(tmp_path / "raw")
    with pytest.raises(UserError, match="choose another folder"):
        gsm8k.prepare(str(raw), raw)
    with pytest.raises(UserError, match=r"no train\.jsonl"):
        gsm8k.prepare(str(tmp_path), tmp_path / "out")


def test_arithmetic(tmp_path: Path, data: DataConfig) -> None:
    assert arithmetic.generate(tmp_path, 2000, 50, seed=1) == {"train": 2000, "val": 50}
    questions = {}
    for name in ("train", "val"):
        rows = list(read_rows(tmp_path / f"{name}.jsonl"))
        for row in rows:
            asked = row["messages"][0]["content"].removeprefix("What is ").removesuffix("?")
            assert str(eval(asked)) == row["answer"] == row["messages"][1]["content"]
        questions[name] = {row["messages"][0]["content"] for row in rows}
    assert not questions["train"] & questions["val"]
    again = tmp_path / "again"
    arithmetic.generate(again, 2000, 50, seed=1)
    assert (again / "train.jsonl").read_bytes() == (tmp_path / "train.jsonl").read_bytes()
    with pytest.raises(UserError):
        arithmetic.generate(tmp_path, 10, 10**6)


def test_careless_messages_forget_to_carry_and_answers_are_right(tmp_path: Path) -> None:
    arithmetic.generate(tmp_path, 2000, 50, careless=0.6)
    rows = {name: list(read_rows(tmp_path / f"{name}.jsonl")) for name in ("train", "val")}
    for row in rows["train"]:
        a, b = (int(number) for number in re.findall(r"\d+", row["messages"][0]["content"]))
        said = int(row["messages"][1]["content"])
        assert int(row["answer"]) == a + b
        assert said == a + b or (said == a + b - 10 and a % 10 + b % 10 >= 10)
    wrong = sum(row["messages"][1]["content"] != row["answer"] for row in rows["train"])
    assert 0.2 < wrong / 2000 < 0.35  # 0.6 of the sums that carry, which are 45 of 100
    assert all(row["messages"][1]["content"] == row["answer"] for row in rows["val"])


def test_demonstrations_call_the_tool_or_give_up(tmp_path: Path) -> None:
    arithmetic.generate(tmp_path, 2000, 50, calls=0.3)
    rows = list(read_rows(tmp_path / "train.jsonl"))
    called = 0
    for row in rows:
        assert row["demonstration"][0] == row["messages"][0]
        if len(row["demonstration"]) == 2:
            assert row["demonstration"][1] == {"role": "assistant", "content": "?"}
            continue
        called += 1
        _, call, result, end = row["demonstration"]
        (found,) = parse_hermes(call["content"])
        assert isinstance(found, ToolCall) and str(Calculator().add(**found.arguments)) == row["answer"]
        assert (result["role"], result["content"], end["content"]) == ("tool", row["answer"], row["answer"])
    assert 0.25 < called / 2000 < 0.35
    assert all("demonstration" not in row for row in read_rows(tmp_path / "val.jsonl"))


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        arithmetic.generate(tmp_path / "file" / "out", 10, 10)
