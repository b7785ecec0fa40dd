"""The driver names a checkpoint when workers have written its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.errors import RunError
from hpc_rl.rl.saving import Saving
from hpc_rl.training.checkpoints import checkpoint
from hpc_rl.training.checkpoints.checkpoint import ACTOR, CRITIC, Progress

SOON_S = 60


def begin(folder: Path) -> tuple[Path, Saving]:
    partial = checkpoint.begin(folder, 7)
    progress = Progress(samples=1, dtype="float32", parts=(ACTOR, CRITIC), step=7)
    return partial, Saving(folder, partial, progress, keep=2)


def write(part: Path) -> None:
    part.mkdir(parents=True)
    (part / ".metadata").touch()


def test_it_is_named_when_both_parts_are_there(tmp_path: Path) -> None:
    partial, saving = begin(tmp_path)
    write(partial / ACTOR)
    with pytest.raises(RunError, match=r"step-00000007.tmp was not written within 0 s"):
        saving.wait(0.01)
    write(partial / CRITIC)
    saving.wait(SOON_S)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert checkpoint.read_progress(tmp_path / "step-00000007").parts == (ACTOR, CRITIC)


def test_the_workers_word_counts_too(tmp_path: Path) -> None:
    """A shared file system may show a file of another node only later."""
    partial, saving = begin(tmp_path)
    partial.joinpath(ACTOR).mkdir()
    saving.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_failure_has_its_cause(tmp_path: Path) -> None:
    partial, saving = begin(tmp_path)
    partial.rmdir()
    with pytest.raises(RunError, match=r"step-00000007 could not be written: .*No such file or directory"):
        saving.finish()
