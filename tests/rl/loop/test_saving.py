"""The driver names a checkpoint when workers have written its parts. The workers are stand-ins."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.errors import RunError
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop import saving
from hpc_rl.rl.loop.saving import WorkerModels
from hpc_rl.training.checkpoints import checksums, folders, model_state
from hpc_rl.training.checkpoints import saver as saver_module
from hpc_rl.training.checkpoints.folders import ACTOR, CRITIC, Progress
from hpc_rl.training.checkpoints.saver import Saver
from hpc_rl.training.parallel.distributed import ONE_PROCESS

SOON_S = 600
STEP = "step-00000007"


class Workers:
    """Groups that write their parts when a test calls `write`, and report this, or an error, when they are asked."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self.error: RunError | None = None
        self.is_reported = threading.Event()

    def save(self, role: str, path: Path) -> Pending[None]:
        self.paths[role] = path
        return Pending.known(None)

    def saved(self, role: str) -> Pending[None]:
        return Pending(self._report, [role])  # type: ignore[list-item]

    def write(self, *roles: str) -> None:
        for role in roles:
            self.paths[role].mkdir(parents=True)
            checksums.write(self.paths[role], {})

    def _report(self, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.is_reported.set()


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def saver(tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Saver:
    monkeypatch.setattr(saving, "_POLL_S", 0.01)
    group: Any = workers
    return Saver(tmp_path, WorkerModels(group, group), ONE_PROCESS, keep=2)


def begin(saver: Saver) -> None:
    saver.save(Progress(samples=1, dtype="float32", step=7))


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def await_names(folder: Path, *wanted: str) -> None:
    deadline = time.monotonic() + SOON_S
    while names(folder) != list(wanted):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_named_when_both_parts_are_there(tmp_path: Path, saver: Saver, workers: Workers) -> None:
    """Although no worker has reported it."""
    begin(saver)
    workers.write(ACTOR)
    time.sleep(0.1)
    assert names(tmp_path) == [f"{STEP}.tmp"]
    workers.write(CRITIC)
    await_names(tmp_path, STEP)
    assert folders.read_progress(tmp_path / STEP).parts == (ACTOR, CRITIC)
    saver.wait()
    assert saver.take_seconds() is not None and saver.take_seconds() is None


def test_a_file_of_another_node_may_be_visible_later_than_its_report(
    tmp_path: Path, saver: Saver, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, None, False, True])

    def is_written(part: Path) -> bool:
        if not workers.is_reported.is_set() or part.name == CRITIC:
            return workers.is_reported.is_set()
        if (found := next(looks)) is None:
            raise OSError(116, "Stale file handle")
        return found

    monkeypatch.setattr(model_state, "is_written", is_written)
    begin(saver)
    workers.write(ACTOR, CRITIC)
    saver.wait()
    assert names(tmp_path) == [STEP]
    assert next(looks, None) is None


def test_a_part_that_is_missing_after_the_report(
    tmp_path: Path, saver: Saver, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_VISIBLE_S", 0)
    begin(saver)
    workers.write(CRITIC)
    with pytest.raises(RunError, match=rf"{STEP} could not be written: No such file"):
        saver.wait()
    assert names(tmp_path) == []


def test_what_is_being_named_is_not_discarded(
    tmp_path: Path, saver: Saver, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system does not answer in time, and then goes on."""
    began, goes_on, name = threading.Event(), threading.Event(), folders.name

    def stalled(*how: Any) -> Path:
        began.set()
        goes_on.wait(SOON_S)
        return name(*how)

    monkeypatch.setattr(folders, "name", stalled)
    monkeypatch.setattr(saver_module, "AFTER_ERROR_S", 0.01)
    begin(saver)
    workers.write(ACTOR, CRITIC)
    workers.error = RunError("rank 0 has died")
    assert began.wait(SOON_S)
    with pytest.raises(RunError, match="rank 0 has died"):
        saver.wait()
    assert names(tmp_path) == [f"{STEP}.tmp"]
    goes_on.set()
    await_names(tmp_path, STEP)


def test_what_is_complete_is_not_discarded(
    tmp_path: Path, saver: Saver, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker fails after its part is complete, and before the driver has looked."""
    monkeypatch.setattr(saving, "_POLL_S", SOON_S)
    has_looked, is_written = threading.Event(), model_state.is_written

    def look(part: Path) -> bool:
        found = is_written(part)
        has_looked.set()
        return found

    monkeypatch.setattr(model_state, "is_written", look)
    begin(saver)
    assert has_looked.wait(SOON_S)
    workers.write(ACTOR, CRITIC)
    workers.error = RunError("rank 0 has died")
    with pytest.raises(RunError, match="rank 0 has died"):
        saver.wait()
    assert names(tmp_path) == [STEP]


def test_what_a_worker_could_not_write_is_discarded(tmp_path: Path, saver: Saver, workers: Workers) -> None:
    begin(saver)
    workers.write(ACTOR)
    workers.error = RunError("No space left on device")
    with pytest.raises(RunError, match=r"^No space left on device"):
        saver.wait()
    assert names(tmp_path) == []
    workers.error = None
    begin(saver)  # the next one starts afresh
    workers.write(ACTOR, CRITIC)
    saver.wait()
    assert names(tmp_path) == [STEP]


def test_what_a_worker_could_not_begin_is_discarded(
    tmp_path: Path, saver: Saver, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(role: str, path: Path) -> None:
        raise RunError("out of memory")

    monkeypatch.setattr(workers, "save", fail)
    with pytest.raises(RunError, match="out of memory"):
        begin(saver)
    assert names(tmp_path) == []


def test_what_could_not_be_named_is_discarded(
    tmp_path: Path, saver: Saver, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_synced", refuse)
    begin(saver)
    workers.write(ACTOR, CRITIC)
    with pytest.raises(RunError, match="No space left on device"):
        saver.wait()
    assert names(tmp_path) == []


@pytest.mark.parametrize(("is_done", "died", "seconds"), [(True, True, 120), (False, True, 30), (False, False, 120)])
def test_after_an_error_a_checkpoint_is_awaited_for_a_short_time(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, is_done: bool, died: bool, seconds: float
) -> None:
    """The time is shorter if a process that writes has died."""
    asked: list[Any] = []
    waited: list[Any] = []
    monkeypatch.setattr(saving, "has_died", lambda calls: asked.extend(calls) or died)
    writer = SimpleNamespace(is_writing=not is_done, wait=lambda seconds, *_: waited.append(seconds))
    monkeypatch.setattr(saver, "_writer", writer)
    with pytest.raises(RunError, match="no GPU"), saver:
        raise RunError("no GPU")
    assert waited == [seconds] and asked == ([] if is_done else [ACTOR, CRITIC])


def test_after_an_error_nothing_waits_for_a_part_that_never_comes(
    tmp_path: Path,
    saver: Saver,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(saving, "has_died", lambda _: True)
    monkeypatch.setattr(saving, "_AFTER_DEATH_S", 0.1)
    with pytest.raises(ZeroDivisionError), saver:
        begin(saver)
        workers.write(ACTOR)
        raise ZeroDivisionError
    reason = "a process that wrote a part of it has died"
    assert f"{STEP} was not written within 0 s: {reason}" in capsys.readouterr().err
    await_names(tmp_path)
