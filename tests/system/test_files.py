import json
import os
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.system.files import (
    MOST_LINE_BYTES,
    Follower,
    NotPlainError,
    last_lines_of,
    open_regular,
    open_to_append,
    read_end,
    read_json,
    read_regular,
    replacing,
    tail,
    write_atomically,
    write_jsonl,
    write_synced,
)


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


def in_folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two run directories, each with a file."""
    for name in ("own", "other"):
        (tmp_path / name / "attempt-1" / "logs").mkdir(parents=True)
        for file in ("x", "attempt-1/x", "attempt-1/logs/x"):
            (tmp_path / name / file).write_text(name)
    return tmp_path / "own", tmp_path / "other"


@pytest.mark.parametrize("place", ["x", "attempt-1/x", "attempt-1/logs/x", "attempt-1/logs", "attempt-1"])
def test_no_link_is_followed_in_a_run(tmp_path: Path, place: str) -> None:
    own, other = in_folders(tmp_path)
    file = own / place / "x" if (own / place).is_dir() else own / place
    assert read_regular(file) == b"own"
    shutil.move(own / place, own / "moved")
    (own / place).symlink_to(other / place)
    with pytest.raises(NotPlainError, match="it is a link, or below one"):
        open_regular(file)
    assert read_regular(file, named=True) == b"other"
    (tmp_path / "latest").symlink_to(other)  # the way to a run may have links
    assert read_regular(tmp_path / "latest" / "attempt-1" / "x") == b"other"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(("file", "folder", "is_read"), [(0, 0, True), (7, 7, True), (0, 7, False), (7, 0, False)])
def test_a_file_belongs_to_the_owner_of_its_folder(tmp_path: Path, file: int, folder: int, is_read: bool) -> None:
    own, _ = in_folders(tmp_path)
    os.chown(own, folder, folder)
    os.chown(own / "x", file, file)
    if is_read:
        assert read_regular(own / "x") == b"own"
    else:
        with pytest.raises(NotPlainError, match="it belongs to another user than its folder"):
            read_regular(own / "x")
    os.chown(own / "attempt-1", folder + 1, 0)
    with pytest.raises(NotPlainError, match="it is in a folder of another user"):
        read_regular(own / "attempt-1" / "x")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("named", [True, False])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path, make: Any, named: bool) -> None:
    make(path := tmp_path / "x")
    with pytest.raises(FileNotFoundError if named else NotPlainError):
        open_regular(path, named=named)
    with pytest.raises(OSError):
        open_to_append(path)
    assert tail(path) == "" and read_end(path, 9) == b"" and read_json(path) == {} and Follower(path).new_lines() == []


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(path, 4)
    os.truncate(path, 2**40)
    assert read_json(path) == {} and read_end(path, 3) == bytes(3) and tail(path)
    assert len(Follower.at_end(path, 7).new_text()) == 7


def test_the_last_lines_of_a_file_without_long_ones(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one\n" + b"x" * 50 + b"\ntwo\n" + b"y" * 10 + b"\nend")
    with path.open("rb") as file:
        assert list(last_lines_of(file, 1000, 10)) == [b"one\n", b"two\n", b"y" * 10 + b"\n", b"end"]
        assert list(last_lines_of(file, 1000, 9)) == [b"one\n", b"two\n", b"end"]
        assert list(last_lines_of(file, 8, 100)) == [b"yyyy\n", b"end"]
        assert list(last_lines_of(file, 0, 100)) == []


def test_a_line_that_never_ends_comes_in_parts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a\n" + b"x" * (MOST_LINE_BYTES + 1))
    follower = Follower(log)
    assert [len(line) for line in follower.new_lines()] == [1, MOST_LINE_BYTES + 1]
    assert follower.rest == "" and follower.new_lines() == []


def test_appending_creates_a_file_and_follows_no_link(tmp_path: Path) -> None:
    for _ in range(2):
        with open_to_append(tmp_path / "x") as file:
            file.write(b"1")
            assert os.get_blocking(file.fileno())
    assert (tmp_path / "x").read_bytes() == b"11"
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(OSError):
        open_to_append(tmp_path / "link")
    with pytest.raises(OSError):
        write_synced(tmp_path / "link", "2")
    assert (tmp_path / "x").read_bytes() == b"11"
