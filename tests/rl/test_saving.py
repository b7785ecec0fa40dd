"""The driver names a checkpoint when workers have written its parts."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.errors import RunError
from hpc_rl.rl import checkpoints
from hpc_rl.rl import saving as saving_module
from hpc_rl.rl.calls import Pending
from hpc_rl.rl.saving import Saving
from hpc_rl.training.checkpoints import checksums, folders, model_state
from hpc_rl.training.checkpoints.background import DEADLINE_S
from hpc_rl.training.checkpoints.folders import ACTOR, CRITIC, Progress

SOON_S = 600


def begin(folder: Path) -> tuple[Path, Saving]:
    partial = folders.begin(folder, 7)
    progress = Progress(samples=1, dtype="float32", parts=(ACTOR, CRITIC), step=7)
    return partial, Saving(folder, partial, progress, keep=2)


def begin_written(folder: Path) -> Saving:
    """Begin a checkpoint whose parts are all written."""
    partial, saving = begin(folder)
    for part in (ACTOR, CRITIC):
        write(partial / part)
    return saving


def write(part: Path) -> None:
    part.mkdir(parents=True)
    checksums.write(part, {})


def test_it_is_named_when_both_parts_are_there(tmp_path: Path) -> None:
    partial, saving = begin(tmp_path)
    write(partial / ACTOR)
    with pytest.raises(RunError, match=r"step-00000007.tmp was not written within 0 s"):
        saving.wait(0.01)
    write(partial / CRITIC)
    saving.wait(SOON_S)
    assert saving.is_done
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert folders.read_progress(tmp_path / "step-00000007").parts == (ACTOR, CRITIC)


def test_a_file_of_another_node_may_be_visible_later_than_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, is_reported = iter([False, None, False, True]), threading.Event()
    monkeypatch.setattr(saving_module, "_POLL_S", 0.01)

    def is_written(part: Path) -> bool:
        if not is_reported.is_set() or part.name == CRITIC:
            return is_reported.is_set()
        if (found := next(looks)) is None:
            raise OSError(116, "Stale file handle")
        return found

    monkeypatch.setattr(model_state, "is_written", is_written)
    partial, saving = begin(tmp_path)
    write(partial / ACTOR)
    write(partial / CRITIC)
    is_reported.set()
    saving.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert next(looks, None) is None


def test_a_part_that_is_missing_after_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_module, "_VISIBLE_S", 0)
    monkeypatch.setattr(saving_module, "_POLL_S", 0.01)
    partial, saving = begin(tmp_path)
    write(partial / CRITIC)
    with pytest.raises(RunError, match=r"step-00000007 could not be written: No such file"):
        saving._parts_are_written.set()
        saving.wait(SOON_S)
    assert folders.numbered(tmp_path) == []


def test_a_failure_has_its_cause(tmp_path: Path) -> None:
    saving = begin_written(tmp_path)
    saving.wait(SOON_S)
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000006.tmp")
    second = Saving(tmp_path / "absent", tmp_path / "step-00000006.tmp", Progress(1, "float32", (ACTOR,), 6), keep=2)
    with pytest.raises(RunError, match=r"step-00000006 could not be written: No such file or directory"):
        second.wait(SOON_S)


def test_a_checkpoint_is_complete_although_old_ones_are_removed_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(folders, "remove_old", lambda *_: goes_on.wait(SOON_S))
    monkeypatch.setattr(saving_module, "_REMOVAL_S", 0.01)
    saving = begin_written(tmp_path)
    saving.finish()
    assert saving.is_done and [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    goes_on.set()


def test_a_save_waits_for_the_removal_of_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_awaited, removed = threading.Event(), []

    def remove(*how: Any) -> None:
        is_awaited.wait(SOON_S)
        removed.append(how)

    monkeypatch.setattr(folders, "remove_old", remove)
    saving = begin_written(tmp_path)
    join = saving._thread.join

    def await_removal(seconds: float) -> None:
        is_awaited.set()
        join(seconds)

    monkeypatch.setattr(saving._thread, "join", await_removal)
    saving.finish()
    is_awaited.set()
    assert removed == [(tmp_path, 2)]


def test_naming_has_as_much_time_as_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Saving, "wait", lambda self, seconds: waited.append(seconds))
    monkeypatch.setattr(saving_module, "_POLL_S", 0.01)
    monkeypatch.setattr(saving_module, "_REMOVAL_S", 0)
    _, saving = begin(tmp_path)
    saving.finish()
    saving.discard()
    assert waited == [DEADLINE_S]


def test_what_is_being_named_is_not_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system does not answer in time, and then goes on."""
    began, goes_on, name = threading.Event(), threading.Event(), folders.name

    def stalled(*how: Any) -> Path:
        began.set()
        goes_on.wait(SOON_S)
        return name(*how)

    monkeypatch.setattr(folders, "name", stalled)
    saving = begin_written(tmp_path)
    assert began.wait(SOON_S)
    saving.discard()
    goes_on.set()
    saving.wait(SOON_S)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_what_is_complete_is_not_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker fails after its part is complete, and before the driver has looked."""
    monkeypatch.setattr(saving_module, "_POLL_S", SOON_S)
    saving = begin_written(tmp_path)
    saving.discard()
    saving.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_what_is_discarded_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look for parts lasts until they have been discarded."""
    looks, is_discarded = threading.Event(), threading.Event()

    def is_written(part: Path) -> bool:
        if threading.current_thread() is threading.main_thread():
            return False
        looks.set()
        return is_discarded.wait(SOON_S)

    monkeypatch.setattr(model_state, "is_written", is_written)
    saving = begin_written(tmp_path)
    assert looks.wait(SOON_S)
    saving.discard()
    is_discarded.set()
    saving._thread.join(SOON_S)
    assert not saving.is_done and list(tmp_path.iterdir()) == []


def test_what_could_not_be_named_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_synced", refuse)
    saving = begin_written(tmp_path)
    with pytest.raises(RunError, match="No space left on device"):
        saving.finish()
    saving.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("is_done", "died", "seconds"), [(True, True, 120), (False, True, 30), (False, False, 120)])
def test_after_an_error_a_checkpoint_is_awaited_for_a_short_time(
    monkeypatch: pytest.MonkeyPatch, is_done: bool, died: bool, seconds: float
) -> None:
    """The time is shorter if a process that writes has died."""
    asked: list[Any] = []
    waited: list[Any] = []
    monkeypatch.setattr(checkpoints, "has_died", lambda calls: asked.extend(calls) or died)
    group = SimpleNamespace(saved=lambda role: Pending(lambda _: None, [role]))
    saving = SimpleNamespace(is_done=is_done, wait=lambda *how: waited.append(how))
    state: Any = SimpleNamespace(saving=saving, actor=group, critic=group)
    with pytest.raises(RunError, match="no GPU"), checkpoints.finished(state):
        raise RunError("no GPU")
    reason = ("a process that wrote a part of it has died",) if seconds == 30 else ()
    assert waited == [(seconds, *reason)] and asked == ([] if is_done else ["actor", "critic"])
