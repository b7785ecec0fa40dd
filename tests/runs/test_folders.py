"""The folders in which a user has submitted runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.runs import folders
from hpc_rl.runs.folders import MOST_FOLDERS, newest_runs, remember, run_folders


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(tmp_path: Path, *names: str) -> list[Path]:
    """Make folders of runs and remember them."""
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.mkdir(parents=True)
        remember(path)
    return paths


def the_list() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "hpc-rl" / "run-folders"


def test_this_project_and_the_newest_first(tmp_path: Path) -> None:
    here = Path("runs").absolute()
    assert run_folders() == [here]
    a, b = made(tmp_path, "a", "b")
    assert run_folders() == [here, b, a]
    remember(a)
    remember(here)
    assert run_folders() == [here, a, b]
    a.rmdir()
    assert run_folders() == [here, b]
    assert the_list().parent.stat().st_mode & 0o777 == 0o700


def test_the_list_has_an_end(tmp_path: Path) -> None:
    paths = made(tmp_path, *(f"p{number}" for number in range(MOST_FOLDERS + 2)))
    assert run_folders()[1:] == paths[:1:-1]


def test_a_umask_for_groups_does_not_open_the_list(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        made(tmp_path, "a", "b")
    finally:
        os.umask(before)
    assert run_folders()[1:] == [tmp_path / "b", tmp_path / "a"]


@pytest.mark.parametrize("mark", ["sweep.json", "pipeline.json"])
def test_a_set_of_runs_counts_as_the_folder_above_it(tmp_path: Path, mark: str) -> None:
    sets = [tmp_path / "all" / "one", tmp_path / "all" / "other"]
    for path in sets:
        path.mkdir(parents=True)
        (path / mark).touch()
        remember(path)
    assert run_folders()[1:] == [tmp_path / "all"]


def test_runs_and_lists_of_others_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("own", "of-another"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.json").touch()
    monkeypatch.setattr(folders, "is_own_folder", lambda path: path.name != "of-another")
    assert [run.name for run in newest_runs()] == ["own"]


def test_an_unknown_home_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which does not count
    monkeypatch.setattr(Path, "expanduser", unknown)
    made(tmp_path, "a")
    assert run_folders() == [Path("runs").absolute()]


def test_a_list_that_others_can_change_does_not_count(tmp_path: Path) -> None:
    made(tmp_path, "a")
    the_list().chmod(0o666)
    assert len(run_folders()) == 1


def test_a_list_that_cannot_be_written_or_read_is_no_error(tmp_path: Path) -> None:
    the_list().parent.parent.mkdir()
    the_list().parent.write_text("a file")
    made(tmp_path, "a")
    assert len(run_folders()) == 1


def test_a_folder_with_a_line_break_is_left_out(tmp_path: Path) -> None:
    made(tmp_path, "a", "b\nc")
    assert run_folders()[1:] == [tmp_path / "a"]


def test_the_newest_runs_of_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "a", "runs")
    for name, submitted in (("a/old", 10), ("runs/new", 30), ("a/middle", 20), ("runs/not-submitted", None)):
        (tmp_path / name).mkdir()
        if submitted is not None:
            (tmp_path / name / "job.json").write_text("{}")
            os.utime(tmp_path / name / "job.json", (submitted, submitted))
    assert [run.name for run in newest_runs()] == ["new", "middle", "old"]
    monkeypatch.setattr(folders, "MOST_RUNS", 2)
    assert [run.name for run in newest_runs()] == ["new", "middle"]
