from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.software import jit_caches
from hpc_rl.software.jit_caches import VARIABLES, cache_folder, jit_cache_defaults


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as a disk, whatever file system the tests run on."""
    monkeypatch.setattr(jit_caches, "file_system", lambda path, mounts: "ext4")
    tmp_path.chmod(0o1777)
    return tmp_path


def own(base: Path) -> Path:
    return base / f"hpc-rl-cache-{os.getuid()}"


def test_caches_are_private_and_stay_for_the_next_job(disk: Path) -> None:
    first = jit_cache_defaults({"TMPDIR": str(disk)}, disk / "job-1")
    assert first.keys() == VARIABLES.keys() and len(set(first.values())) == len(VARIABLES)
    assert own(disk).stat().st_mode & 0o777 == 0o700
    Path(first["TRITON_CACHE_DIR"]).mkdir(parents=True)
    assert jit_cache_defaults({"TMPDIR": str(disk)}, disk / "job-2") == first
    assert Path(first["TRITON_CACHE_DIR"]).is_dir()


def test_what_was_written_before_the_node_started_is_removed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_folder(disk)
    assert before is not None
    before.mkdir(parents=True)
    (disk / "boot").write_text("another boot\n")
    monkeypatch.setattr(jit_caches, "_BOOT", disk / "boot")
    after = cache_folder(disk)
    assert after is not None and after != before and not before.exists()


def test_two_installations_share_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache_folder(disk)
    monkeypatch.setattr(jit_caches.platform, "libc_ver", lambda: ("glibc", "1.0"))
    assert cache_folder(disk) != here


def a_link(folder: Path) -> None:
    (folder.parent / "theirs").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "theirs")


def a_file(folder: Path) -> None:
    folder.touch(mode=0o600)


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


@pytest.mark.parametrize("make", [a_link, a_file, open_to_others])
def test_a_folder_that_another_user_may_have_made_is_not_used(disk: Path, make: object) -> None:
    assert callable(make)
    make(own(disk))
    assert cache_folder(disk) is None
    found = jit_cache_defaults({"TMPDIR": str(disk)}, disk / "job-1")
    assert found["TRITON_CACHE_DIR"] == str(disk / "job-1" / "jit" / "triton")


def test_the_folder_of_another_user_is_not_used(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    own(disk).mkdir(mode=0o700)
    folder = disk / f"hpc-rl-cache-{me + 1}"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert cache_folder(disk) is None  # neither the folder nor what is above it is this user's


def test_a_place_where_others_can_replace_folders_is_not_used(disk: Path) -> None:
    disk.chmod(0o777)
    assert cache_folder(disk) is None
    assert not own(disk).exists()


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_caches_in_memory_end_with_the_job(disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(jit_caches, "file_system", lambda path, mounts: kind)
    assert cache_folder(disk) is None
    assert not own(disk).exists()
