import os
import time
from pathlib import Path

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.saved import Checkpoint, newest_saved, record_saved
from hpc_rl.run_dir import RunDir


def test_the_newest_that_is_complete_and_still_there(tmp_path: Path) -> None:
    run, out, other = RunDir(tmp_path), tmp_path / "out", tmp_path / "other"
    assert newest_saved(run) is None
    for folder, step in ((out, 1), (out, 2), (other, 3), (out, 4)):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        record_saved(run, Checkpoint(step, str(folder / f"checkpoint-{step}"), 2))
    (out / "checkpoint-9").mkdir()  # not recorded: incomplete, or of another run
    assert newest_saved(run, out) == newest_saved(run) == Checkpoint(4, str(out / "checkpoint-4"), 2)
    (out / "checkpoint-4").rmdir()
    assert (newest_saved(run) or Checkpoint(0, "")).step == 3
    with run.saved.open("a") as file:
        file.write('{"step": 5, "path"')  # written in part when the process ended
    assert (newest_saved(run, out) or Checkpoint(0, "")).step == 2


def test_a_checkpoint_that_another_training_has_overwritten_is_not_resumed(tmp_path: Path) -> None:
    run, path = RunDir(tmp_path), tmp_path / "out" / "checkpoint-5"
    path.mkdir(parents=True)
    record_saved(run, Checkpoint(5, str(path), 1, "train-0"))
    assert (newest_saved(run, path.parent, "train-0") or Checkpoint(0, "")).step == 5
    assert newest_saved(run, path.parent, "train-1") is None
    record_saved(run, Checkpoint(5, str(path), 1, "train-1"))
    assert newest_saved(run, path.parent, "train-0") is None
    assert (newest_saved(run, path.parent, "train-1") or Checkpoint(0, "")).part == "train-1"


def test_what_is_known_of_earlier_attempts(tmp_path: Path) -> None:
    place, began = ProgramPlace(RunDir(tmp_path)), time.time()
    assert not place.after_attempts().is_later and place.after_attempts().began >= began
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / "log").touch()
    os.utime(tmp_path / "attempt-1" / "log", (1000, 1000))
    assert not place.after_attempts(before="attempt-1").is_later
    for later in (place.after_attempts(before="attempt-2"), place.after_attempts()):
        assert later.is_later and later.began == 1000
