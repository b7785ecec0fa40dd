"""Tokenized data on disk: written once, by all ranks; used again; and what happens if something is wrong with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from hpc_rl.data.identity import contents_of, state_of
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.sample_files import CHATS
from hpc_rl.data.sft_dataset import Counts, Sample
from hpc_rl.data.tokenized import Writer
from hpc_rl.errors import AgreedError, AgreedRunError, UserError
from hpc_rl.finetune import dataset
from hpc_rl.run_dir import RunDir
from hpc_rl.system import entries
from hpc_rl.token_cache import cache
from hpc_rl.token_cache import entry as entry_module
from hpc_rl.token_cache.cache import Team, open_tokenized
from hpc_rl.token_cache.entry import Files, TokenizeRequest
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopped
from tests.finetune.forked import SETTINGS, Forked
from tests.finetune.jobs import ALONE, spawn
from tests.small_disk import needs_root, small_disk

COUNT = 1000
"""Rows: four blocks."""


class Stopping:
    """Stops the run at a question, counted from 1, about whether to."""

    def __init__(self, at: int = 0, in_vain: bool = False) -> None:
        self.asked, self._at, self._in_vain = 0, at, in_vain

    def due(self, work_s: float) -> bool:
        self.asked += 1
        return self.asked == self._at

    def is_in_vain(self) -> bool:
        return self._in_vain


def tokenize(rows: Iterable[tuple[Row, str]]) -> tuple[list[Sample | None], Counts]:
    """Row n has n % 5 + 1 tokens; each seventh one is dropped."""
    found: list[Sample | None] = []
    counts = Counts()
    for row, where in rows:
        number, length = row["n"], row["n"] % 5 + 1
        if number < 0:
            raise UserError(f"{where}: a negative number")
        counts.rows += 1
        if number % 7 == 0:
            counts.dropped += 1
            found.append(None)
        else:
            counts.tokens += length
            found.append(Sample(np.full(length, number, np.int32), np.arange(length) > 0))
    return found, counts


KEPT = [number for number in range(COUNT) if number % 7]
COUNTED = Counts(rows=COUNT, tokens=sum(number % 5 + 1 for number in KEPT), dropped=COUNT - len(KEPT))


def not_again(_: Any) -> Any:
    raise AssertionError("the data is tokenized again")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "rows.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(COUNT)))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of temporary folders, which have to be gone afterwards."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def request(file: Path, work: Any = tokenize) -> TokenizeRequest:
    names = [str(file)]
    return TokenizeRequest(Files(names, "train", state_of(names)), work, CHATS, "key", contents_of(names, "train"))


def load(
    file: Path, root: Path, work: Any = tokenize, stopping: Any = None, world: World = ALONE
) -> tuple[list[int], Counts]:
    """The rows that were kept, by their numbers."""
    rows, counts = open_tokenized(request(file, work), root, None, world, stopping or Stopping())
    assert all(len(row.input_ids) == row.input_ids[0] % 5 + 1 for row in rows)
    return [int(row.input_ids[0]) for row in rows], counts


def entry_of(root: Path) -> Path:
    (entry,) = root.glob("[!.]*")
    return entry


def test_data_is_tokenized_once(file: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(file, root) == load(file, root, not_again) == (KEPT, COUNTED)
    assert capsys.readouterr() == ("", "")
    entry = entry_of(root)
    assert sorted(path.name for path in entry.iterdir()) == [
        "checksums.json",
        "data.json",
        "lock",
        "part-00-of-01.arrow",
    ]
    assert root.stat().st_mode & 0o777 == 0o700 and list(root.iterdir()) == [entry]
    assert json.loads((entry / "data.json").read_text())["files"] == [str(file)]


def test_ranks_that_train_may_stop_while_the_others_wait() -> None:
    group: Any = object()
    serving = World(0, 2, ALONE.device, group=group)
    for world, made_a_step, expected in ((ALONE, False, True), (serving, False, False), (serving, True, True)):
        stopping: Any = SimpleNamespace(due=lambda work_s: work_s == 0.0, made_a_step=made_a_step)
        assert cache.is_due(world, stopping) is expected
        assert not cache.is_due(replace(world, rank=1), stopping)


def test_the_data_stays_while_it_is_used_and_the_last_use_is_noted(file: Path, root: Path) -> None:
    rows, _ = open_tokenized(request(file), root, None, ALONE, Stopping())  # type: ignore[arg-type]
    entry = entry_of(root)
    assert not entries.remove(entry)
    os.utime(entry / "lock", (0, 0))
    load(file, root, not_again)
    assert (entry / "lock").stat().st_mtime > time.time() - 600
    assert len(rows) == len(KEPT)
    del rows
    assert entries.remove(entry)


def jobs(file: Path, roots: Sequence[Path], mode: str = "") -> list[str]:
    """The command of processes that load the data one time for each of the folders, and print what they got."""
    return [__file__, mode, str(file), *map(str, roots)]


EXPECTED = json.dumps([KEPT, str(COUNTED)])


def test_two_ranks_share_the_work_and_any_number_reads_it(file: Path, root: Path) -> None:
    load(file, root / "one")
    for code, out, errors in spawn(jobs(file, [root / "two", root / "one"]), ranks=2):
        assert (code, out.splitlines()) == (0, [EXPECTED, EXPECTED]), errors
    sizes = [path.stat().st_size for path in sorted(entry_of(root / "two").glob("*.arrow"))]
    assert len(sizes) == 2 and max(sizes) < 2 * min(sizes)
    assert len(list(entry_of(root / "one").glob("*.arrow"))) == 1
    assert load(file, root / "two", not_again) == (KEPT, COUNTED)


def test_a_bad_row_is_an_error_of_all_ranks(file: Path, root: Path) -> None:
    with file.open("a") as rows:
        rows.write('{"n": -1}\n' * 20)
    for code, out, errors in spawn(jobs(file, [root]), ranks=2):
        assert (code, out) == (2, f"AgreedError: rank 1: {file}, row {COUNT + 1}: a negative number\n"), errors
    assert not any(root.iterdir())
    with pytest.raises(AgreedError, match=f"^{file}, row {COUNT + 1}: a negative number$"):
        load(file, root)
    assert not any(root.iterdir())


def test_nodes_that_do_not_share_the_folder_have_one_each(file: Path, root: Path) -> None:
    """Both ranks report another host, and have another root. The second time, one of them has to tokenize."""
    for _ in range(2):
        for code, out, errors in spawn(jobs(file, [root], "nodes"), ranks=2):
            assert (code, out.splitlines()) == (0, [EXPECTED]), errors
        for rank in range(2):
            assert len(list(entry_of(root / f"node{rank}").glob("*.arrow"))) == 1
        shutil.rmtree(entry_of(root / "node1"))


@contextlib.contextmanager
def waiting(file: Path, root: Path, folder: Path) -> Iterator[Forked]:
    """A process that has begun to tokenize, and goes on when the file `go` exists."""
    folder.mkdir()
    process = Forked(jobs(file, [root], "slow"), {**os.environ, **SETTINGS}, folder)
    try:
        until(lambda: any(root.glob(".key*/*.arrow")))
        yield process
    finally:
        process.kill()


def until(holds: Callable[[], bool], timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_blocks_nobody(file: Path, root: Path, tmp_path: Path) -> None:
    with waiting(file, root, tmp_path / "first"):
        pass
    assert any(root.glob(".key*.partial"))
    assert load(file, root) == (KEPT, COUNTED)
    assert list(root.iterdir()) == [entry_of(root)]


def test_of_two_runs_at_once_the_first_entry_stays(file: Path, root: Path, tmp_path: Path) -> None:
    with waiting(file, root, tmp_path / "other") as other:
        assert load(file, root) == (KEPT, COUNTED)
        entry = entry_of(root).stat()
        (file.parent / "go").touch()
        code, out, errors = other.wait(300)
    assert (code, out.splitlines()) == (0, [EXPECTED]), errors
    assert list(root.iterdir()) == [entry_of(root)] and os.path.samestat(entry, entry_of(root).stat())


@pytest.mark.parametrize("times", [1, 3])
def test_an_entry_that_another_run_removes_is_written_again(
    file: Path, root: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that find the same damage could each remove what the other has written. This ends after three times."""
    removed: list[Path] = []

    def opened(asked: TokenizeRequest, entry: Path, share: Any) -> Any:
        if len(removed) < times:
            entries.set_aside(entry)
            removed.append(entry)
        return entry_module.opened(asked, entry, share)

    load(file, root)
    monkeypatch.setattr(cache, "opened", opened)
    if times == 1:
        assert load(file, root) == (KEPT, COUNTED)
    else:
        with pytest.raises(AgreedError, match=r"cannot be read \(lock is missing\): delete this folder if it exists"):
            load(file, root)
    assert len(removed) == times and not list(root.glob(".*.partial"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda entry: flip(entry / "part-00-of-01.arrow"), "does not match its checksum"),
    "short": (lambda entry: os.truncate(entry / "part-00-of-01.arrow", 100), "has 100 of "),
    "missing": (lambda entry: (entry / "part-00-of-01.arrow").unlink(), "part-00-of-01.arrow is missing"),
    "half-written": (lambda entry: (entry / "checksums.json").unlink(), "checksums.json is missing"),
    "no json": (lambda entry: (entry / "checksums.json").write_text("{"), "checksums.json is not a JSON object"),
    "no sums": (lambda entry: (entry / "checksums.json").write_text("{}"), "checksums.json is not valid"),
    "description": (lambda entry: flip(entry / "data.json"), "data.json does not match its checksum"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_written_again(
    file: Path, root: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load(file, root)
    DAMAGE[damage][0](entry_of(root))
    assert load(file, root) == (KEPT, COUNTED)
    out = capsys.readouterr().out
    assert out.startswith(f"tokenized data of {file} in {entry_of(root)} is damaged (") and out.count("\n") == 1
    assert DAMAGE[damage][1] in out and out.endswith("): tokenizing again\n")
    assert load(file, root, not_again) == (KEPT, COUNTED)
    assert list(root.iterdir()) == [entry_of(root)]


def test_an_entry_without_its_lock_is_written_again(file: Path, root: Path) -> None:
    load(file, root)
    (entry_of(root) / "lock").unlink()
    assert load(file, root) == (KEPT, COUNTED)
    assert load(file, root, not_again) == (KEPT, COUNTED)


def test_an_entry_of_earlier_contents_is_replaced(
    file: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(file, root)
    earlier = entry_of(root)
    with file.open("a") as rows:
        rows.write('{"n": 1}\n')
    assert load(file, root)[0] == [*KEPT, 1]
    line = f"tokenized data of {file} is stale, because the data has changed: tokenizing again\n"
    assert capsys.readouterr().out == line
    assert entry_of(root) != earlier
    held = entries.hold(entry_of(root))
    assert held is not None
    file.write_text('{"n": 2}\n')
    assert load(file, root)[0] == [2]
    assert len(list(root.iterdir())) == 2, "the earlier one is in use"
    held.close()
    monkeypatch.setattr(entries, "local_by_mount", lambda *_: "/lus (lustre, mounted with localflock)")
    file.write_text('{"n": 33}\n')
    assert load(file, root)[0] == [33]
    assert len(list(root.iterdir())) == 3, "locks do not show whether they are in use"


def test_what_cannot_be_removed_stays(file: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    load(file, root)
    monkeypatch.setattr(entries, "remove", refuse)
    (root / ".other.partial").mkdir()
    file.write_text('{"n": 2}\n')
    assert load(file, root)[0] == [2]
    assert len(list(root.glob("[!.]*"))) == 2


def test_copies_of_the_data_on_other_nodes_have_other_times(file: Path, root: Path) -> None:
    asked = replace(request(file), contents="what rank 0 has found")
    assert len(open_tokenized(asked, root, None, ALONE, Stopping())[0]) == len(KEPT)  # type: ignore[arg-type]


def test_a_key_that_cannot_be_computed_is_an_error_of_all_ranks(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("no key")

    objective: Any = SimpleNamespace(config=SimpleNamespace(data=None), tokenizer=lambda _: tokenize)
    tokenizer: Any = SimpleNamespace(get_chat_template=lambda: "")
    monkeypatch.setattr(dataset, "tokenizer_of", fail)
    with pytest.raises(AgreedError, match="no key"):
        dataset.load_items(objective, [str(file)], tokenizer, "train", RunDir(tmp_path), ALONE, Stopping())  # type: ignore[arg-type]


def test_columns_that_are_not_needed_are_not_read(file: Path, root: Path) -> None:
    table = file.with_suffix(".parquet")
    rows = [{"n": number, "text": "x"} for number in range(COUNT)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)

    def work(read: Any) -> Any:
        found = list(read)
        assert all(list(row) == ["n"] for row, _ in found)
        return tokenize(found)

    asked = request(table, work)
    assert isinstance(asked.source, Files)
    asked = replace(asked, source=replace(asked.source, columns=["n"]))
    assert len(open_tokenized(asked, root, None, ALONE, Stopping())[0]) == len(KEPT)  # type: ignore[arg-type]


def test_data_that_changes_while_it_is_read_is_refused(file: Path, root: Path) -> None:
    def change(rows: Any) -> Any:
        with file.open("a") as more:
            more.write('{"n": 5}\n')
        return tokenize(rows)

    with pytest.raises(AgreedError, match=rf"{file}: changed while it was read; start the run again"):
        load(file, root, change)
    assert not any(root.iterdir())


def test_a_folder_that_others_can_change_is_not_used(
    file: Path, root: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.mkdir()
    root.chmod(0o777)
    assert load(file, root) == (KEPT, COUNTED)
    assert capsys.readouterr().out == (
        f"tokenized data of {file} is in a temporary folder of each node, and not kept: {root} cannot be used (it can "
        "be changed by all users, so other users could change what is in it); to keep it, set cache.data_dir to a "
        "folder with space that only you can write to\n"
    )
    assert not any(root.iterdir()) and not any(temporary.iterdir())


def refuse_writing(monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
    """Let the second block of a file below a folder not fit on its disk."""
    write = Writer.write

    def full(self: Writer, items: Any) -> None:
        if self.kept and any(below.glob("**/*.arrow")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, items)

    monkeypatch.setattr(Writer, "write", full)


def test_a_full_disk(
    file: Path, root: Path, temporary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writing(monkeypatch, root)
    assert load(file, root) == (KEPT, COUNTED)
    out = capsys.readouterr().out
    assert f"{root} cannot be used (No space left on device: file system " in out and "raise your quota)" in out
    assert not any(root.iterdir()) and not any(temporary.iterdir())
    refuse_writing(monkeypatch, root.parent)
    with pytest.raises(AgreedRunError, match=r"cannot be written, neither to .*No space left.* set cache\.data_dir to"):
        load(file, root)
    assert not any(root.iterdir()) and not any(temporary.iterdir())


def test_a_disk_that_fills_up_at_the_end(
    file: Path, root: Path, temporary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = entry_module.complete

    def full(folder: Path, *rest: Any) -> None:
        if folder.is_relative_to(root):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        complete(folder, *rest)

    monkeypatch.setattr(cache, "complete", full)
    assert load(file, root) == (KEPT, COUNTED)
    assert f"{root} cannot be used (Disk quota exceeded: file system " in capsys.readouterr().out
    assert not any(root.iterdir()) and not any(temporary.iterdir())


@needs_root
def test_a_disk_that_is_really_full(
    file: Path, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk.path / "cache").mkdir(mode=0o700)
        disk.fill(leave_bytes=8192)
        assert load(file, disk.path / "cache") == (KEPT, COUNTED)
        assert f"file system {disk.path} (tmpfs) has " in capsys.readouterr().out
        assert not any((disk.path / "cache").iterdir()) and not any(temporary.iterdir())


def test_a_run_stops_while_it_tokenizes(file: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_ROUND_S", 0)
    with pytest.raises(Stopped, match=r"^stopped before the data was tokenized: nothing is saved yet$"):
        load(file, root, stopping=Stopping(at=2))
    assert not any(root.iterdir())
    with pytest.raises(AgreedRunError) as found:
        load(file, root, stopping=Stopping(at=2, in_vain=True))
    assert "the walltime ends before the data is tokenized" in str(found.value)
    stopping = Stopping()
    load(file, root, stopping=stopping)
    assert stopping.asked == 5, "after each of four blocks, and after the end of the data"


def test_the_ranks_of_a_team_and_their_parts() -> None:
    assert Team(0, (0, 1, 2), 2).part() == (2, 3) and Team(0, (0, 1, 2), 2).share() == (2, 3)
    assert Team(0, (0, 1, 2), 0).leads and not Team(0, (0, 1, 2), 1).leads
    assert Team(4, (4, 5), 5).part() == (1, 2) and Team(4, (4, 5), 4).leads
    ranks = tuple(range(130))  # three ranks for each of at most 64 parts
    parts = [Team(0, ranks, rank).part() for rank in ranks]
    assert parts[:7] == [(0, 44), None, None, (1, 44), None, None, (2, 44)]
    assert [part for part in parts if part] == [(number, 44) for number in range(44)]


def main(mode: str, file: Path, roots: Sequence[Path]) -> int:
    world = distributed.start("cpu", start_timeout_s=300)
    work: Any = {"slow": slowly(file.parent / "go")}.get(mode, tokenize)
    with pytest.MonkeyPatch.context() as patch:
        if mode == "nodes":
            roots = [root / f"node{world.rank}" for root in roots]
            patch.setattr("socket.gethostname", lambda: f"node{world.rank}")
        try:
            for root in roots:
                kept, counts = load(file, root, work, world=world)
                print(json.dumps([kept, str(counts)]), flush=True)
        except UserError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            return error.exit_code
    distributed.finish()
    return 0


def slowly(go: Path) -> Any:
    def work(rows: Any) -> Any:
        until(go.exists)
        return tokenize(rows)

    return work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), list(map(Path, sys.argv[3:]))))
