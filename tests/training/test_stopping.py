"""The decision to stop before the end of the walltime, on a clock that the tests set."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.training import stopping as stopping_module
from hpc_rl.training.stopping import SAVING, WAITING, WRITING, Stopping, open_stopping, stopped_line

END = 10_000.0
PHASES = {"timing_s/gen": 60.0, "timing_s/update": 40.0, "timing_s/step": 500.0}


class Time:
    def __init__(self) -> None:
        self.left_s = 10_000.0

    def __call__(self) -> float:
        return END - self.left_s


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(stopping_module, "SETTLE_S", 0.0)
    return Time()


def stopping(folder: Path, time: Time, warning_s: int = 180, end: float | None = END) -> Stopping:
    return Stopping(RunDir(folder), warning_s, lambda: end, time)


def latest(stopping: Stopping, time: Time, run: Path, work_s: float) -> float:
    """Return the time that is left when the run stops, in whole seconds, before which it does not."""
    for left_s in range(2000, 0, -1):
        time.left_s = left_s
        if stopping.due(work_s):
            assert (run / "stop").read_text() == "walltime\n"
            return left_s
    return 0


def test_the_stop_file_always_counts(tmp_path: Path, time: Time) -> None:
    asked = stopping(tmp_path, time, end=None)
    assert not asked.due(1e9)
    (tmp_path / "stop").write_text("user\n")
    assert asked.due(0)
    assert (tmp_path / "stop").read_text() == "user\n"


def test_a_step_is_not_begun_if_it_would_run_into_the_warning(tmp_path: Path, time: Time) -> None:
    """180 s for the checkpoint, and 1.25 x 100 s for the step."""
    found = stopping(tmp_path, time)
    found.note_step(PHASES)
    assert found.rest_s() == 100
    assert latest(found, time, tmp_path, found.rest_s()) == 304


def test_waiting_for_data_says_nothing_about_the_next_step(tmp_path: Path, time: Time) -> None:
    found = stopping(tmp_path, time)
    found.note_step({**PHASES, WAITING: 900.0})
    assert found.rest_s() == 100


def test_a_long_checkpoint_replaces_the_warning(tmp_path: Path, time: Time) -> None:
    """1.25 x 400 s for the checkpoint, 1.25 x 100 s for the step, and 30 s for the end of the processes."""
    found = stopping(tmp_path, time)
    found.note_step(PHASES)
    found.note_test(70.0)
    for name, seconds in ((SAVING, 400.0), (SAVING, 300.0), ("timing_s/gen", 9000.0), (SAVING, 300.0)):
        found.note_save({name: seconds})
    found.note_test(None)
    assert found.testing_s == 70
    assert latest(found, time, tmp_path, found.rest_s()) == 654
    (tmp_path / "stop").unlink()
    found.note_save({SAVING: 200.0})
    assert latest(found, time, tmp_path, 0) == 404  # 1.25 x 300 + 30 = 405
    (tmp_path / "stop").unlink()
    found.note_save({WRITING: 100.0})
    assert latest(found, time, tmp_path, 0) == 654  # 1.25 x (300 + 2 x 100) + 30 = 655


def test_phases_that_are_done_no_longer_count(tmp_path: Path, time: Time) -> None:
    found = stopping(tmp_path, time)
    found.note_step(PHASES)
    assert found.rest_s({"timing_s/gen"}) == 40
    found.note_step({"timing_s/gen": 20.0, "timing_s/update": 45.0})
    assert found.rest_s() == 60 + 45


def test_only_the_latest_steps_count(tmp_path: Path, time: Time) -> None:
    found = stopping(tmp_path, time)
    found.note_step({"timing_s/gen": 900.0})
    for _ in range(9):
        found.note_step({"timing_s/gen": 3.0})
    assert found.rest_s() == 900
    found.note_step({"timing_s/gen": 4.0})
    assert found.rest_s() == 4


def test_the_times_of_an_earlier_attempt_count_and_the_first_step_is_tried(tmp_path: Path, time: Time) -> None:
    records = [{"step": 2, "timing_s/gen": 4.0, "timing_s/save_checkpoint": 2.0, "timing_s/write_checkpoint": 200.0}]
    records += [{"step": 3 + n, "timing_s/gen": 4.0} for n in range(20)]
    records += [{"step": 40, "timing_s/step": 9.0, "timing_s/gen": 5.0, "x": None}]
    found = stopping(tmp_path, time)
    found.remember(records)
    assert found.rest_s() == 5
    time.left_s = 1
    assert not found.due(found.rest_s())
    found.made_a_step = True
    assert latest(found, time, tmp_path, 5) == 538  # 1.25 x (2 + 2 x 200) + 30 + 1.25 x 5 = 538.75


def test_a_run_without_progress_is_in_vain_only_at_the_walltime(tmp_path: Path, time: Time) -> None:
    found = stopping(tmp_path, time)
    time.left_s = 200
    assert not found.is_in_vain()
    (tmp_path / "stop").write_text("requeue\n")
    assert not found.is_in_vain()
    (tmp_path / "stop").write_text("walltime\n")
    assert found.is_in_vain()
    time.left_s = 271  # the warning before a preemption
    assert not found.is_in_vain()
    time.left_s = 200
    found.note_step(PHASES)
    assert not found.is_in_vain()


def test_the_environment_and_the_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_RL_JOB_END", "17")
    found = open_stopping(RunDir(tmp_path), 180, [{"step": 1, "timing_s/gen": 2.0}])
    assert found.rest_s() == 2
    found.made_a_step = True
    assert found.due(0)


def test_a_later_end_of_the_walltime_is_read(tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job was suspended. The script of the job learns the new end after the trainer goes on."""
    monkeypatch.setattr(stopping_module, "SETTLE_S", 60.0)
    ends = iter([END, END, END + 1000])
    found = Stopping(RunDir(tmp_path), 180, lambda: next(ends), time)
    found.made_a_step = True
    time.left_s = -20
    assert not found.due(5) and not (tmp_path / "stop").exists()
    assert next(ends, None) is None


def test_a_request_of_the_user_is_not_replaced(tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system, a new file may be seen late."""
    found = stopping(tmp_path, time)
    found.made_a_step = True
    time.left_s = 20
    (tmp_path / "stop").write_text("user\n")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert found.due(5)
    assert (tmp_path / "stop").read_text() == "user\n"


def test_the_last_line_states_what_is_saved() -> None:
    assert stopped_line(3, 9) == "stopped after step 3 of 9: checkpoint saved"
    assert stopped_line(0, 9) == "stopped after step 0 of 9: nothing is saved yet"
