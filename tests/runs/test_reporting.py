from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import reporting
from hpc_rl.runs.status import RunStatus, statuses_of
from hpc_rl.slurm.accounting import JobStart
from hpc_rl.slurm.place import Place
from hpc_rl.tracking.history import read_history
from tests.tracking.runs import BEGAN, make_run


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def end(run: RunDir, state: str, job_id: str = "local-1") -> RunDir:
    """Let the run be one of another machine, so that neither Slurm nor a process is asked."""
    job: dict[str, Any] = {"job_id": job_id, "host": "elsewhere", "pid": 1, "start_time": 1}
    run.job.write_text(json.dumps(job))
    run.status.write_text(json.dumps({"job_id": job_id, "attempt": 1, "state": state, "exit_code": 0}))
    return run


def make_sweep(root: Path, started: int = 2) -> Path:
    points = [{"optim.lr": "1e-5"}, {"optim.lr": "3e-5"}, {"optim.lr": "1e-4"}]
    for number in range(1, len(points) + 1):
        steps, attempts = (5, 1) if number <= started else (0, 0)
        end(make_run(root / "lr", f"lr_{number}", steps, 5, attempts=attempts), "COMPLETED")
    (root / "lr" / "sweep.json").write_text(json.dumps({"kind": "ppo", "points": points}))
    return root / "lr"


def test_a_sweep_is_all_of_its_runs_that_have_started(root: Path) -> None:
    folder = make_sweep(root)
    selected = reporting.select(["lr"])
    assert [(one.run.name, one.swept["optim.lr"]) for one in selected][1:] == [("lr_2", "3e-5"), ("lr_3", "1e-4")]
    path = reporting.default_path(["lr"], selected)
    assert path == folder / "report.html"
    assert reporting.write_report(selected, path) is False
    page = path.read_text()
    assert "<h1>sweep lr</h1>" in page and "lr_2" in page and "lr_3" not in page


def test_a_sweep_of_which_nothing_has_started(root: Path) -> None:
    make_sweep(root, started=0)
    with pytest.raises(UserError, match="no run of the sweep has started"):
        reporting.write_report(reporting.select(["lr"]), Path("page.html"))


def test_one_run_of_a_sweep_is_a_run(root: Path) -> None:
    make_sweep(root)
    (one,) = reporting.select(["lr_1"])
    assert one.swept == {} and reporting.default_path(["lr_1"], [one]) == one.run.report
    assert reporting.default_path(["lr_1", "lr_2"], reporting.select(["lr_1", "lr_2"])) == Path("report.html")


def test_a_page_is_rewritten_until_the_run_has_ended(root: Path) -> None:
    run = end(make_run(root, "r", 5, 9, exit_code=None), "RUNNING")
    pages: list[str] = []

    def pause(seconds: float) -> None:
        assert seconds == reporting.REFRESH_S
        pages.append(run.report.read_text())
        if len(pages) == 2:
            end(run, "COMPLETED")

    reporting.follow_report(reporting.select(["r"]), run.report, pause)
    assert len(pages) == 2 and all('data-refresh="30"' in page for page in pages)
    assert "reloads every" not in run.report.read_text()


def test_leaving_ends_the_reloads(root: Path) -> None:
    run = end(make_run(root, "r", 5, 9, exit_code=None), "RUNNING")

    def pause(_seconds: float) -> None:
        raise KeyboardInterrupt

    reporting.follow_report(reporting.select(["r"]), run.report, pause)
    assert "reloads every" not in run.report.read_text() and "step 5 of 9" in run.report.read_text()


def test_without_accounting_nothing_changes(root: Path) -> None:
    run = end(make_run(root, "r", exit_code=None), "RUNNING", "7")
    run.status.unlink()
    assert reporting.accounted_histories([run], statuses_of([run])) == [read_history(run)]


def test_the_page_shows_the_state_that_status_shows(root: Path) -> None:
    """The job was submitted again and cancelled before it began: its state is not that of the last attempt."""
    run = end(make_run(root, "r", 5, 9, exit_code=None), "CANCELLED")
    run.status.write_text(json.dumps({"job_id": "local-1", "attempt": 2, "state": "CANCELLED", "exit_code": None}))
    reporting.write_report(reporting.select(["r"]), run.report)
    page = run.report.read_text()
    assert '<span class="state failed">CANCELLED</span>' in page and '<td class="state failed">KILLED</td>' in page


@pytest.mark.parametrize(
    ("job_id", "state", "shown"),
    [("7", "TIMEOUT", "TIMEOUT"), ("7", "PENDING", "KILLED"), ("8", "CANCELLED", "KILLED")],
)
def test_the_last_attempt_ended_like_its_job(root: Path, job_id: str, state: str, shown: str) -> None:
    run = make_run(root, "r", exit_code=None)
    (found,) = reporting.accounted_histories([run], [RunStatus("r", str(run.path), job_id, state)])
    assert [attempt.state for attempt in found.attempts] == [shown]


def test_accounting_is_asked_once_for_all_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(root, name, exit_code=None) for name in ("a", "b", "c")]
    end(runs[2], "COMPLETED")
    asked: list[list[str]] = []

    def job_starts(job_ids: list[str], _place: Place) -> list[JobStart]:
        asked.append(job_ids)
        return [JobStart("7", "TIMEOUT", 0, BEGAN, BEGAN + 7200, 2)]

    monkeypatch.setattr(reporting.commands, "job_starts", job_starts)
    found = reporting.accounted_histories(runs, statuses_of(runs))
    assert asked == [["7"]] and [history.attempts[0].state for history in found] == ["TIMEOUT", "TIMEOUT", "COMPLETED"]
