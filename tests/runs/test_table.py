import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.cli.text import runs_table
from hpc_rl.errors import UserError
from hpc_rl.runs import table
from hpc_rl.runs.status import find_run
from hpc_rl.runs.sweeps import find_sweep


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def make_run(folder: Path, submitted: str, state: str | None, metrics: dict[str, Any] | None = None) -> None:
    """A run that ended as a local one, so that nobody is asked about it."""
    folder.mkdir(parents=True)
    (folder / "job.sbatch").touch()
    if state is None:
        return
    job = {"job_id": "local-1", "kind": "sft", "submitted": submitted, "host": "elsewhere", "pid": 1, "start_time": 1}
    (folder / "job.json").write_text(json.dumps(job))
    code = {"COMPLETED": 0, "FAILED": 3, "STOPPED": 75}[state]
    (folder / "status.json").write_text(
        json.dumps({"job_id": "local-1", "attempt": 1, "state": state, "exit_code": code})
    )
    if metrics:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "total_steps": 40, "time": 1.0, **metrics}) + "\n")


def make_sweep(folder: Path) -> None:
    for number, state in enumerate(("COMPLETED", "FAILED"), 1):
        measured = {"train/loss": 2.0, "val/loss": 1.5} if state == "COMPLETED" else None
        make_run(folder / f"{folder.name}_{number}", f"2025-01-02T00:00:0{number}", state, measured)
    points = [{"optim.lr": "1e-5"}, {"optim.lr": "3e-5"}]
    (folder / "sweep.json").write_text(json.dumps({"kind": "sft", "points": points}))


def test_all_runs_the_newest_last(root: Path) -> None:
    make_run(root / "later", "2025-01-03T00:00:00", "STOPPED")
    make_run(root / "first", "2025-01-01T00:00:00", "COMPLETED", {"train/loss": 0.25})
    make_sweep(root / "lr")
    make_run(root / "rendered", "", None)
    (root / "no run").mkdir()
    rows = table.all_runs()
    assert [row.status.run for row in rows] == ["rendered", "first", "lr_1", "lr_2", "later"]
    assert [row.sweep for row in rows] == [None, None, "lr", "lr", None]
    lines = runs_table(rows).splitlines()
    assert lines[0].split() == ["run", "job", "state", "step", "last", "metric", "node", "hours"]
    assert lines[2].split() == ["first", "local-1", "COMPLETED", "3/40", "train/loss", "0.25", "0.00"]
    assert "NOT SUBMITTED" in lines[1]


def test_a_sweep_is_a_table_of_its_values(root: Path) -> None:
    make_sweep(root / "lr")
    sweep = find_sweep("lr")
    assert sweep is not None
    rows = table.runs_of(sweep)
    header, good, bad = (line.split() for line in runs_table(rows).splitlines())
    assert header[:3] == ["run", "optim.lr", "job"]
    assert good[:4] == ["lr_1", "1e-5", "local-1", "COMPLETED"] and good[5:7] == ["val/loss", "1.5"]
    assert bad[:5] == ["lr_2", "3e-5", "local-1", "FAILED", "(3)"]
    assert rows[1].as_dict()["values"] == {"optim.lr": "3e-5"}
    assert json.loads(json.dumps(rows[0].as_dict()))["node_hours"] == 0


def test_points_are_runs_and_a_sweep_is_none(root: Path) -> None:
    make_sweep(root / "lr")
    assert find_run("lr_2").path == root / "lr" / "lr_2"
    with pytest.raises(UserError, match="lr is a sweep: name one of its runs, such as lr_1"):
        find_run("lr")
    with pytest.raises(UserError, match="did you mean lr_2"):
        find_run("lr_22")
    assert find_sweep("lr_2") is None and find_sweep("nothing") is None
