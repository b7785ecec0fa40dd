import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpc_rl import run_dir
from hpc_rl.cli import app
from hpc_rl.cli.text import size_text
from hpc_rl.errors import UserError
from hpc_rl.run_dir import SWEEP_MARK, TOKENIZED, RunDir
from hpc_rl.runs import cleaning
from hpc_rl.runs.cleaning import (
    DAY_S,
    DiskUsage,
    leftovers,
    old_checkpoints,
    older_than,
    remove,
    remove_tokenized,
    tokenized_data,
    usage_of,
    whole_runs,
)
from hpc_rl.runs.folders import runs_below, submitting
from hpc_rl.runs.status import RunStatus, status_of
from hpc_rl.system import entries
from hpc_rl.training.checkpoints import checksums, folders
from hpc_rl.training.checkpoints.folders import Progress


def make_run(folder: Path, name: str, state: str = "COMPLETED", steps: tuple[int, ...] = (10, 20, 9)) -> RunDir:
    run = RunDir(folder / "runs" / name)
    for step in steps:
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"step-{step:08d}" / "weights").write_bytes(b"x" * 1000 * step)
    run.model.mkdir(parents=True, exist_ok=True)
    (run.model / "model.safetensors").write_bytes(b"x" * 500)
    run.script.write_text("echo\n")
    run.job.write_text(json.dumps({"job_id": "local-1", "kind": "sft", "host": "x", "pid": 1, "start_time": 1}))
    run.status.write_text(json.dumps({"job_id": "local-1", "attempt": 1, "state": state, "exit_code": 0}))
    return run


def usage(run: RunDir, *, active: bool = False, age_s: float = 0) -> DiskUsage:
    return DiskUsage(run, "RUNNING" if active else "COMPLETED", active, 0, 0, 77, age_s)


def test_sizes_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    os.link(run.model / "model.safetensors", run.model / "same")  # counts once
    (run.path / "elsewhere").symlink_to(run.checkpoints)
    changed = max(path.lstat().st_mtime for path in (run.path, *run.path.rglob("*")))
    found = usage_of(run, status_of(run), now=changed + 5)
    assert (found.checkpoints, found.model, found.age_s) == (39_000, 500, pytest.approx(5))
    texts = sum(file.stat().st_size for file in (run.script, run.job, run.status))
    assert found.total == 39_500 + texts and not found.active


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    assert [one.path.name for one in old_checkpoints([usage(run)], 1)] == ["step-00000009", "step-00000010"]
    assert [one.path.name for one in old_checkpoints([usage(run)], 2)] == ["step-00000009"]
    assert len(old_checkpoints([usage(run)], 0)) == 3
    assert [one.size for one in old_checkpoints([usage(run)], 1)] == [9000, 10_000]


def test_incomplete_checkpoints_and_those_set_aside_go_first(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=())
    for step in (1, 2, 3):
        folders.begin(run.checkpoints, step)
        folders.name(run.checkpoints, Progress(samples=1, dtype="float32", parts=(), step=step))
    (run.checkpoints / "step-00000003" / "trainer.json").write_text("{")
    (run.checkpoints / "step-00000004.aside").mkdir()
    (run.checkpoints / "step-00000004.tmp").mkdir()
    left = ["step-00000003", "step-00000004.aside", "step-00000004.tmp"]
    assert [one.path.name for one in old_checkpoints([usage(run)], 2)] == left
    assert [one.path.name for one in old_checkpoints([usage(run)], 1)] == ["step-00000001", *left]


def test_active_runs_are_never_touched(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    assert old_checkpoints([usage(run, active=True)], 0) == whole_runs([usage(run, active=True)]) == []
    assert [one.path for one in whole_runs([usage(run)])] == [run.path]


def test_only_runs_that_are_old_enough(tmp_path: Path) -> None:
    young, old = usage(RunDir(tmp_path / "y"), age_s=2 * DAY_S), usage(RunDir(tmp_path / "o"), age_s=2 * DAY_S + 1)
    assert older_than([young, old], 2) == [old]


def test_removal_frees_what_it_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    removals = old_checkpoints([usage(run)], 1)
    assert remove(removals, pytest.fail) == 19_000
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000020"]
    with pytest.raises(UserError, match="cannot remove"):
        remove(removals, pytest.fail)


def test_what_is_in_use_by_the_time_of_its_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of all runs are measured before, which takes minutes on a slow file system."""
    monkeypatch.setattr(run_dir, "LOCK_TIMEOUT_S", 0.0)
    folder = tmp_path / "runs" / "many"
    runs = [make_run(tmp_path, name) for name in ("again", "submitting", "starting", "by-hand", "many/many_1")]
    again, submitted, starting, by_hand = runs[:4]
    found = [usage(run) for run in runs]
    again.write_status("local-1", 2, "RUNNING", None)
    (folder / SWEEP_MARK).touch()
    by_hand.job.unlink()
    by_hand.status.unlink()
    lines: list[str] = []
    with submitting(submitted.path), starting.take_lock(), by_hand.take_lock("local-2"), submitting(folder):
        assert remove(old_checkpoints(found, 1), lines.append) == remove(whole_runs(found), lines.append) == 0
    assert [line.partition("was removed: ")[2][:33] for line in lines[5:]] == [
        "it is RUNNING as job local-1",
        "run submitting is being submitted",
        "job ? is running in " + str(starting.path)[:13],
        "it is RUNNING as job local-2",
        "run many is being submitted or re",
    ]
    assert all(len(list(run.checkpoints.iterdir())) == 3 for run in runs)
    assert remove(whole_runs(found[1:]), pytest.fail) == 4 * 77


@pytest.mark.parametrize("read", [True, False])
def test_a_damaged_checkpoint_is_not_kept_instead_of_an_intact_one(tmp_path: Path, read: bool) -> None:
    run = make_run(tmp_path, "a", steps=())
    for step in (1, 2, 3):
        part = folders.begin(run.checkpoints, step) / "model"
        part.mkdir()
        (part / "weights").write_bytes(b"good")
        checksums.write(part, {"weights": checksums.of_file(part / "weights")})
        folders.name(run.checkpoints, Progress(samples=1, dtype="float32", step=step))
    newest = run.checkpoints / "step-00000003"
    (newest / "model" / "weights").write_bytes(b"gooe")
    lines: list[str] = []
    kept = "step-00000002" if read else "step-00000003"
    old = [one.path.name for one in old_checkpoints([usage(run)], 1, lines.append if read else None)]
    assert old == sorted({f"step-0000000{step}" for step in (1, 2, 3)} - {kept})
    reason = "model/weights does not match its checksum"
    assert lines == [f"{newest} is damaged ({reason}), so it does not count as a checkpoint to keep"] * read
    for step in (1, 2):
        (run.checkpoints / f"step-0000000{step}" / "model" / "weights").write_bytes(b"gooe")
    old = [one.path.name for one in old_checkpoints([usage(run)], 1, lines.append)]
    assert old == ["step-00000001", "step-00000002"], "without an intact one, the newest stays"


def test_an_interrupted_removal_is_finished_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path, name, steps=(10, 20)) for name in ("a", "many/many_1", "b")]
    (tmp_path / "runs" / "many" / SWEEP_MARK).touch()
    (tmp_path / "runs" / ".cache.removed").mkdir()  # of something else
    removals = whole_runs([usage(run) for run in runs[:2]]) + old_checkpoints([usage(runs[2])], 1)
    doomed = [one.path.with_name(f".{one.path.name}.{os.getpid()}.removed") for one in removals]
    with monkeypatch.context() as patch:

        def fail(path: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                raise PermissionError(13, "Permission denied")

        patch.setattr(cleaning.shutil, "rmtree", fail)
        for removal, left in zip(removals, doomed, strict=True):
            with pytest.raises(UserError, match=f"cannot remove {left}: Permission denied") as caught:
                remove([removal], pytest.fail)
            assert left.is_dir(), caught
    root = tmp_path / "runs"
    assert {path.name for path in runs_below(root)} == {"b"}
    found = leftovers(root, [runs[2]])
    assert [one.path for one in found] == sorted(doomed) and all(one.size >= 10_000 for one in found)
    assert remove(found, pytest.fail) == sum(one.size for one in found)
    assert not leftovers(root, runs) and (root / ".cache.removed").exists()


def test_the_folder_of_runs_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "a")
    left = tmp_path / "runs" / ".b.12.removed"
    left.mkdir()
    (tmp_path / "runs").rename(tmp_path / "disk")
    (tmp_path / "runs").symlink_to("disk")
    assert remove([*leftovers(Path("runs"), [run]), *whole_runs([usage(run)])], pytest.fail) > 0
    assert not list((tmp_path / "disk").iterdir())


def clean(*words: str) -> list[str]:
    """Return the lines that the command prints."""
    done = CliRunner().invoke(app, ["clean", *words])
    if isinstance(done.exception, UserError):
        raise done.exception
    return done.stdout.splitlines()


def test_the_command_finishes_a_removal_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = tmp_path / "runs" / ".a.1.removed"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(bytes(1000))
    assert clean("--checkpoints") == [f"{'1 kB':>9}  runs/.a.1.removed"]
    assert clean("--whole", "--older-than", "1", "--yes")[1:] == ["removed 1 kB"] and not left.exists()
    assert clean("--checkpoints") == []


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (39_500, "39.5 kB"), (2.5e9, "2.5 GB"), (3e12, "3 TB")],
)
def test_sizes_as_text(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_run_that_slurm_cannot_tell_of_is_active() -> None:
    assert RunStatus("a", "/a", "1", "UNKNOWN").active


def make_entry(root: Path, name: str, size: int, age_s: float = 0.0) -> Path:
    building = entries.EntryWriter(root, name)
    (building.folder / "part").write_bytes(bytes(size))
    (building.folder / "data.json").write_text(json.dumps({"files": ["a.jsonl", "b.jsonl"]}))
    building.publish()
    building.discard()
    used = time.time() - age_s
    os.utime(root / name / entries.LOCK, (used, used))
    return root / name


def test_tokenized_data_that_no_run_uses_is_removed(tmp_path: Path) -> None:
    small, large, used = (make_entry(tmp_path, name, size) for name, size in (("s", 10), ("l", 1000), ("u", 100)))
    make_entry(tmp_path, "incomplete", 10).rename(tmp_path / ".incomplete.0123abcd.partial")
    now = (small / entries.LOCK).stat().st_mtime + 5
    found = tokenized_data(tmp_path, now)
    assert [one.path for one in found] == [large, used, small]
    described = len(json.dumps({"files": ["a.jsonl", "b.jsonl"]}))
    assert (found[0].size, found[0].files) == (1000 + described, ("a.jsonl", "b.jsonl"))
    assert found[2].age_s == pytest.approx(5)
    held = entries.hold(used)
    assert held is not None
    assert remove_tokenized(found, [tmp_path]) == [found[1]]
    assert list(tmp_path.iterdir()) == [used]
    held.close()
    with pytest.raises(UserError, match="no such folder of tokenized data"):
        tokenized_data(tmp_path / "none")


def test_only_folders_with_a_description_count(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").touch()
    (tmp_path / "other" / "data.json").write_text("{}")
    (tmp_path / "file").touch()
    entry = make_entry(tmp_path, "one", 10)
    assert [one.path for one in tokenized_data(tmp_path)] == [entry]


def test_data_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    make_entry(tmp_path, "one", 10)
    found = tokenized_data(tmp_path)
    monkeypatch.setattr(entries, "_locked", refuse)
    assert remove_tokenized(found, [tmp_path]) == found and found[0].path.exists()


def test_the_command_removes_tokenized_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs" / TOKENIZED
    root.mkdir(parents=True)
    new, old = make_entry(root, "new", 2000), make_entry(root, "old", 1000, age_s=3 * DAY_S)
    lines = clean("--tokenized")
    assert [line.split() for line in lines] == [
        ["2.03", "kB", f"runs/{TOKENIZED}/new", "a.jsonl,", "b.jsonl"],
        ["1.03", "kB", f"runs/{TOKENIZED}/old", "a.jsonl,", "b.jsonl"],
    ]
    assert clean("--tokenized", "--older-than", "2", "--yes")[1:] == ["removed 1.03 kB"]
    assert list(root.iterdir()) == [new]
    held = entries.hold(new)
    assert held is not None
    assert clean("--tokenized", str(root), "--yes")[1:] == ["removed 0 B"]
    assert new.exists() and not old.exists()
    held.close()
    new.rename(root / f".new.0123abcd{entries.PARTIAL}")
    assert clean("--tokenized") == [] and len(list(root.iterdir())) == 1
    assert clean("--tokenized", "--yes") == [] and not any(root.iterdir()), "what a killed run has left is removed too"
    with pytest.raises(UserError, match="exclude each other"):
        clean("--tokenized", "--whole")
