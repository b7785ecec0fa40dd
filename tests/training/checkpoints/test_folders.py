"""Which checkpoints are complete, which are kept, and which are never read again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hpc_rl.errors import RunError
from hpc_rl.training.checkpoints import checksums, folders
from hpc_rl.training.checkpoints.folders import ACTOR, CRITIC, Progress

DATA = "__0_0.distcp"


def save(folder: Path, step: int, keep: int = 2, parts: tuple[str, ...] = (ACTOR, CRITIC)) -> Path:
    partial = folders.begin(folder, step)
    for part in parts:
        (partial / part / "hf").mkdir(parents=True)
        (partial / part / "hf" / "config.json").write_text("{}")
        (partial / part / DATA).write_bytes(bytes([step]) * 5000)
        names = ("hf/config.json", DATA)
        checksums.write(partial / part, {name: checksums.of_file(partial / part / name) for name in names})
    final = folders.name(folder, Progress(samples=1, dtype="float32", parts=parts, step=step))
    folders.remove_old(folder, keep)
    return final


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def truncate(path: Path) -> None:
    (path / ACTOR / DATA).write_bytes(b"short")


def test_one_changed_bit_anywhere_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert folders.problem_of(path) is None and folders.damage_of(path) is None
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert len(files) == 2 + 2 * 3
    for file in files:
        before = file.read_bytes()
        for place in (0, len(before) // 2, len(before) - 1):
            flip(file, place)
            assert folders.damage_of(path), (file, place)
            file.write_bytes(before)
        file.unlink()
        assert folders.damage_of(path), file
        file.write_bytes(before)
    assert folders.damage_of(path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["", ACTOR, f"{ACTOR}/{DATA}"])
def test_what_another_user_has_written_is_not_read(tmp_path: Path, name: str) -> None:
    other, path = 64242, save(tmp_path / "run" / "checkpoints", 1)
    os.chown(path / name, other, other)
    assert folders.problem_of(path) == f"{Path(path.name) / name} belongs to another user"
    for entry in (tmp_path / "run", *(tmp_path / "run").rglob("*")):  # a run of that user, which this one exports
        os.chown(entry, other, other)
    assert folders.problem_of(path) is None


@pytest.mark.parametrize("parts", ["../../secret", "/etc", "", "actor/..", ["actor"]])
def test_parts_are_folders_of_the_checkpoint(tmp_path: Path, parts: object) -> None:
    path = save(tmp_path, 1)
    fields = json.loads((path / folders.TRAINER).read_text())
    with pytest.raises((TypeError, ValueError)):
        folders.progress_of({**fields, "parts": [parts]})


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "hf/../../secret"])
def test_checksums_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / checksums.NAME).write_text(json.dumps({name: {"bytes": 1, "crc32": "0"}}))
    with pytest.raises(ValueError, match="names files of other folders"):
        checksums.read(tmp_path)


def test_a_problem_names_the_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / CRITIC / DATA, 4000)
    assert folders.problem_of(path) is None  # sizes are as they were
    assert folders.damage_of(path) == f"critic/{DATA} does not match its checksum"
    shutil.rmtree(path / ACTOR / "hf")
    assert folders.problem_of(path) == "actor/hf/config.json is missing"


def test_each_file_is_read_by_one_rank_and_if_possible_by_the_one_that_wrote_it() -> None:
    sums = {name: checksums.Checksum(1, 1) for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata")}
    assert [list(folders.files_of_rank(sums, rank, 3)) for rank in range(3)] == [
        ["__0_0.distcp", ".metadata"],
        ["__1_0.distcp"],
        ["__2_0.distcp"],
    ]
    for ranks in (1, 2, 5):
        read = [name for rank in range(ranks) for name in folders.files_of_rank(sums, rank, ranks)]
        assert sorted(read) == sorted(sums)


def test_an_unreadable_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 75, keep=1)
    truncate(save(tmp_path, 80, keep=2))
    save(tmp_path, 85, keep=2)
    assert names(tmp_path) == ["step-00000075", "step-00000080", "step-00000085"]
    save(tmp_path, 90, keep=2)
    assert names(tmp_path) == ["step-00000085", "step-00000090"]


def test_a_later_unreadable_one_neither_counts_nor_comes_back(tmp_path: Path) -> None:
    """The run stops at 76 after it resumed from 75, with one checkpoint to keep."""
    save(tmp_path, 75, keep=2)
    broken = save(tmp_path, 80, keep=2)
    good = (broken / ACTOR / DATA).read_bytes()
    truncate(broken)
    folders.resume_after(tmp_path, 75)
    assert names(tmp_path) == ["step-00000075", "step-00000080.aside"]
    save(tmp_path, 76, keep=1)
    assert names(tmp_path) == ["step-00000076", "step-00000080.aside"]
    (tmp_path / "step-00000080.aside" / ACTOR / DATA).write_bytes(good)  # it can be read again
    assert folders.numbered(tmp_path) == [(76, tmp_path / "step-00000076")]


def test_what_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        save(tmp_path, 80)
        folders.resume_after(tmp_path, 75)
    assert names(tmp_path) == ["step-00000080.aside", "step-00000080.aside1", "step-00000080.aside2"]


def test_old_ones_are_removed_only_after_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, keep=1)
    remove_old, during = folders.remove_old, []

    def remove(folder: Path, keep: int) -> None:
        during.append(names(folder))
        remove_old(folder, keep)

    monkeypatch.setattr(folders, "remove_old", remove)
    save(tmp_path, 2, keep=1)
    assert during == [["step-00000001", "step-00000002"]] and names(tmp_path) == ["step-00000002"]


def test_a_checkpoint_that_cannot_be_named_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep=1)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-00000002.tmp":
            raise OSError(30, "Read-only file system")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(RunError, match=r"step-00000002 could not be written: Read-only file system: file system /"):
            save(tmp_path, 2, keep=1)
    assert folders.problem_of(tmp_path / "step-00000001") is None


def test_an_old_one_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, keep=1)

    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-00000001.tmp", "step-00000002"]  # the next save tries again
    assert "warning: " in (errors := capsys.readouterr().err) and "could not be removed" in errors


def test_a_leftover_that_cannot_be_removed_is_in_the_way_of_its_own_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of a removed checkpoint is still open elsewhere, and NFS keeps it."""
    busy = tmp_path / "step-00000001.tmp"
    busy.mkdir()
    (tmp_path / "step-00000007.tmp").mkdir()
    rmtree = shutil.rmtree

    def refuse(path: Path) -> None:
        if path == busy:
            raise OSError(16, "Device or resource busy")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(tmp_path, 2)
    folders.resume_after(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001.tmp", "step-00000002"]
    assert capsys.readouterr().err.count(f"warning: {busy} could not be removed: [Errno 16] Device or") == 2
    with pytest.raises(RunError, match=r"step-00000001.tmp could not be written: Device or resource busy"):
        folders.begin(tmp_path, 1)


def test_one_that_is_partly_removed_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep=1)

    def killed(path: Path) -> None:
        (path / "trainer.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        save(tmp_path, 2, keep=1)
    assert [step for step, _ in folders.numbered(tmp_path)] == [2]
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_what_a_failed_save_wrote_is_removed(tmp_path: Path) -> None:
    (folders.begin(tmp_path, 3) / ACTOR).mkdir()
    folders.discard(tmp_path, 3)
    assert names(tmp_path) == []
