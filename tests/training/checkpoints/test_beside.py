"""Checkpoints that another job reads while their run goes on and removes them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpc_rl.errors import RunError
from hpc_rl.training.checkpoints.beside import Saved, hold, saved_in
from hpc_rl.training.checkpoints.folders import problem_of
from tests.security.users import INTRUDER, needs_root


def make_checkpoint(folder: Path, step: int) -> Saved:
    path = folder / f"step-{step:08d}"
    (path / "model").mkdir(parents=True)
    (path / "model/weights").write_text("weights")
    (path / "trainer.json").write_text("{}")
    return saved_in(folder)[step]


def contents(path: Path | None) -> list[str]:
    assert path is not None
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def test_checkpoints_are_listed_in_order_and_unfinished_ones_are_not(tmp_path: Path) -> None:
    for step in (20, 3):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-00000030.tmp").mkdir()
    (tmp_path / "step-00000040").mkdir()
    assert list(saved_in(tmp_path)) == [3, 20] and saved_in(tmp_path / "none") == {}


def refused(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_what_is_held_outlives_its_checkpoint(tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = make_checkpoint(tmp_path / "checkpoints", 3)
    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    held = hold(saved, tmp_path / "held")
    assert held is not None and (held / "trainer.json").samefile(saved.path / "trainer.json") == has_links
    shutil.rmtree(saved.path)
    assert contents(held) == ["model", "model/weights", "trainer.json"]
    assert hold(saved, tmp_path / "held") == held and saved_in(tmp_path / "held")[3].key == saved.key
    assert hold(make_checkpoint(tmp_path / "checkpoints", 3), tmp_path / "held") == held  # of a step that was repeated
    assert saved_in(tmp_path / "held")[3].key != saved.key


@needs_root
@pytest.mark.parametrize("has_links", [True, False])
def test_what_another_user_has_planted_is_not_read(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel refuses links to files of others (fs.protected_hardlinks)."""
    saved = make_checkpoint(tmp_path / "run/checkpoints", 3)
    os.chown(saved.path / "model/weights", INTRUDER, INTRUDER)
    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    held = hold(saved, tmp_path / "job/held")
    assert held is not None and (held / "model/weights").exists() == has_links
    if has_links:
        assert problem_of(held) == "step-00000003/model/weights belongs to another user"


def test_a_checkpoint_that_goes_meanwhile_is_no_error_and_a_full_disk_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = make_checkpoint(tmp_path / "checkpoints", 3)

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", fails)
        with pytest.raises(RunError, match="step-00000003 could not be written"):
            hold(saved, tmp_path / "held")
    shutil.rmtree(saved.path)
    assert hold(saved, tmp_path / "held") is None and contents(tmp_path / "held") == []
