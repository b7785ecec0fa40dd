"""Entries of a cache: complete or absent, and not removed while a process uses them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.system import entries
from hpc_rl.system.entries import LOCK, EntryWriter, hold

BUILD = "building = entries.EntryWriter(root, 'one')"
HOLD = "held = entries.hold(root / 'one')"


@contextlib.contextmanager
def another(root: Path, work: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does this work, and waits until it is killed at the end of the block."""
    program = f"import pathlib, sys\nfrom hpc_rl.system import entries\nroot = pathlib.Path(sys.argv[1])\n{work}\n"
    command = [sys.executable, "-c", f"{program}print('done', flush=True)\nsys.stdin.read()", str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "done\n"
            yield process
        finally:
            process.kill()
            process.wait(timeout=600)


def make(root: Path, name: str = "one", text: str = "x") -> Path:
    building = EntryWriter(root, name)
    (building.folder / "file").write_text(text)
    building.publish()
    building.discard()
    return root / name


def test_an_entry_is_complete_or_absent(tmp_path: Path) -> None:
    building = EntryWriter(tmp_path, "one")
    assert building.folder.stat().st_mode & 0o777 == 0o700
    (building.folder / "file").write_text("x")
    assert hold(tmp_path / "one") is None
    building.publish()
    assert (tmp_path / "one" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert not entries.remove(tmp_path / "one"), "who has written it has not let go of it"
    building.discard()
    other = EntryWriter(tmp_path, "one")
    other.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_first_of_two_entries_stays(tmp_path: Path) -> None:
    slow = EntryWriter(tmp_path, "one")
    make(tmp_path, text="first")
    slow.publish()
    slow.discard()
    assert (tmp_path / "one" / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_an_entry_in_use_is_not_removed(tmp_path: Path) -> None:
    entry = make(tmp_path)
    with another(tmp_path, HOLD):
        assert not entries.remove(entry) and (entry / "file").exists()
        held = hold(entry)
        assert held is not None, "several processes use it at the same time"
        held.close()
    assert entries.remove(entry) and not any(tmp_path.iterdir())
    assert entries.remove(entry), "it is gone"


def test_a_damaged_entry_in_use_loses_its_name_only(tmp_path: Path) -> None:
    entry = make(tmp_path)
    with another(tmp_path, HOLD):
        entries.set_aside(entry)
        assert not entry.exists()
        (aside,) = tmp_path.iterdir()
        assert (aside / "file").exists()
        entries.sweep(tmp_path)
        assert aside.exists()
        make(tmp_path, text="new")
    entries.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and (entry / "file").read_text() == "new"
    entries.set_aside(entry)
    entries.set_aside(entry)
    assert not any(tmp_path.iterdir())


def test_what_is_discarded_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "local_by_mount", lambda *_: "/lus (lustre, mounted with localflock)")
    entry = make(tmp_path)
    entries.discard(entry)
    assert not any(tmp_path.iterdir())
    entries.discard(entry)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with another(tmp_path, BUILD):
        (partial,) = tmp_path.iterdir()
        entries.sweep(tmp_path)
        assert partial.exists()
    assert partial.exists()
    (tmp_path / ".other").mkdir()
    (tmp_path / f".others{entries.PARTIAL}").mkdir()  # another program's
    os.utime(tmp_path / f".others{entries.PARTIAL}", (0, 0))
    new = tmp_path / f".new.0123abcd{entries.PARTIAL}"
    new.mkdir()  # its process has not locked it yet
    entries.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, ".other", ".others.partial"]
    os.utime(new, (0, time.time() - 3500))
    entries.sweep(tmp_path)
    assert new.exists()
    os.utime(new, (0, time.time() - 3700))
    entries.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other", ".others.partial"]


def test_nothing_is_swept_where_locks_do_not_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another(tmp_path, BUILD):
        (partial,) = tmp_path.iterdir()
    monkeypatch.setattr(entries, "local_by_mount", lambda *_: "/lus (lustre, mounted with localflock)")
    entries.sweep(tmp_path)
    assert partial.exists()
    entry = make(tmp_path)
    assert not entries.remove(entry) and entry.exists()
    entries.set_aside(entry)
    assert not entry.exists() and len(list(tmp_path.glob(f".one.*{entries.REMOVED}/file"))) == 1


def test_locks_of_beegfs_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert entries.locks_reach(tmp_path)
    monkeypatch.setattr(entries, "mount_of", lambda *_: (Path("/bee"), "beegfs"))
    assert not entries.locks_reach(tmp_path)


def test_without_locks_all_but_removing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    entry = make(tmp_path)
    assert not entries.remove(entry) and entry.exists()


def test_the_last_use_is_recorded(tmp_path: Path) -> None:
    entry = make(tmp_path)
    os.utime(entry / LOCK, (0, 0))
    entries.note_use(entry)
    assert time.time() - (entry / LOCK).stat().st_mtime < 600


def test_a_folder_is_created_private(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    assert entries.unusable(root) is None and root.stat().st_mode & 0o777 == 0o700
    assert entries.unusable(root) is None and not any(root.iterdir())


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    found = entries.unusable(root)
    assert found == "it can be changed by all users, so other users could change what is in it"
    (tmp_path / "file").touch()
    found = entries.unusable(tmp_path / "file" / "below")
    assert found is not None and "Not a directory" in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    os.chown(tmp_path / "root", 12345, 12345)
    assert entries.unusable(tmp_path / "root") == "it belongs to user 12345, so other users could change what is in it"
