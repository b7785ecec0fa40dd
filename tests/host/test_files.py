import json
import os
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.host.files import Follower, read_json, replacing, tail, write_atomically, write_jsonl


def test_a_follower_returns_what_is_new(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = Follower(log)
    assert follower.new_text() == ""
    log.write_bytes("a\nü".encode()[:-1])
    assert follower.new_text() == "a\n"
    with log.open("ab") as file:
        file.write("ü".encode()[1:] + b"b\n")
    assert follower.new_text() == "üb\n"
    assert Follower(log, offset=2).new_text() == "üb\n"


def test_the_tail_is_indented(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("".join(f"{number}\n" for number in range(10_000)))
    assert tail(log, 2) == "    9998\n    9999"


@pytest.mark.parametrize("text", [None, "", '{"a": 1', "[1]", "\udcff"])
def test_what_is_not_a_json_object_is_empty(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert read_json(path) == {}
    assert read_json(tmp_path) == {}
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, "old")
    with pytest.raises(KeyError), replacing(path) as partial:
        partial.write_text("half")
        assert partial.parent == tmp_path and partial.name.startswith(".") and str(os.getpid()) in partial.name
        assert os.uname().nodename in partial.name
        assert path.read_text() == "old"
        raise KeyError
    assert [found.name for found in tmp_path.iterdir()] == ["x"] and path.read_text() == "old"
    write_atomically(path, "new")
    assert [found.name for found in tmp_path.iterdir()] == ["x"] and path.read_text() == "new"


def test_the_mode_of_a_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", "")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_rows_are_lines(tmp_path: Path) -> None:
    assert write_jsonl(tmp_path / "new" / "x.jsonl", [{"a": "ü"}, {"b": 2}]) == 2
    assert (tmp_path / "new" / "x.jsonl").read_text() == '{"a": "ü"}\n{"b": 2}\n'
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"cannot write {tmp_path}"):
        write_jsonl(tmp_path / "file" / "x.jsonl", [])


def test_values_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    """Rows of parquet files have them."""
    row = {"day": date(2025, 1, 2), "price": Decimal("1.50"), "image": b"x"}
    write_jsonl(tmp_path / "x.jsonl", [row])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"day": "2025-01-02", "price": "1.50", "image": "b'x'"}


@pytest.mark.parametrize(
    ("umask", "forbidden", "mode"), [(0o002, 0, 0o664), (0o002, 0o022, 0o644), (0o077, 0o022, 0o600)]
)
def test_a_file_that_only_its_owner_may_change(tmp_path: Path, umask: int, forbidden: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "job.sbatch", "#!/bin/bash\n", forbidden=forbidden)
    finally:
        os.umask(before)
    assert (tmp_path / "job.sbatch").stat().st_mode & 0o777 == mode
