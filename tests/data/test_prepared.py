from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_rl.config.schema import DataConfig
from hpc_rl.data import arithmetic, gsm8k
from hpc_rl.data.rows import check_file, read_rows
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
    """The `datasets` path without a network: a folder that it builds a data set from."""
    raw = raw_folder(tmp_path / "raw")
    for name in ("train", "test"):
        (raw / f"{name}.jsonl").rename(raw / f"{name}.json")
    from hpc_rl.data.hub import load_split

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


def test_arithmetic_for_two_kinds_of_training(tmp_path: Path) -> None:
    """Few questions to imitate, more to be rewarded for, and the same unseen ones to be measured on."""
    for name, train in (("few", 100), ("more", 2000)):
        arithmetic.generate(tmp_path / name, train, 200, seed=3, largest=50)
    few, more = (list(read_rows(tmp_path / name / "train.jsonl")) for name in ("few", "more"))
    assert few == more[:100] and len({row["messages"][0]["content"] for row in more}) == 2000
    assert (tmp_path / "few" / "val.jsonl").read_bytes() == (tmp_path / "more" / "val.jsonl").read_bytes()
    assert max(int(row["answer"]) for row in more) > 80
    with pytest.raises(UserError, match="at least 1"):
        arithmetic.generate(tmp_path, 10, 10, largest=0)


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        arithmetic.generate(tmp_path / "file" / "out", 10, 10)
