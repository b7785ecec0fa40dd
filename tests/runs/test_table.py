import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.cli.text import runs_table, status_text
from hpc_rl.errors import UserError
from hpc_rl.formats.offer import LentEnvironments, LentNode, write_lent_nodes
from hpc_rl.runs import table
from hpc_rl.runs.finding import find_run
from hpc_rl.runs.run_sets import find_run_set
from hpc_rl.runs.status import RunStatus
from tests.tracking.runs import write_usage


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
    code = {"COMPLETED": 0, "FAILED": 3, "STOPPED": 75, "TIMEOUT": 143}[state]
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
    rows = table.find_rows(None)[0]
    assert [row.status.run for row in rows] == ["rendered", "first", "lr_1", "lr_2", "later"]
    assert [row.sweep for row in rows] == [None, None, "lr", "lr", None]
    lines = runs_table(rows).splitlines()
    assert lines[0].split() == ["run", "job", "state", "step", "last", "metric", "node", "hours"]
    assert lines[2].split() == ["first", "local-1", "COMPLETED", "3/40", "train/loss", "0.25", "0.00"]
    assert "NOT SUBMITTED" in lines[1]


def test_runs_that_were_submitted_together_are_in_the_order_of_their_sweep_or_pipeline(root: Path) -> None:
    stages = [(number, stage) for number in (1, 2, 10) for stage in ("train", "generate", "evaluate")]
    names = {"lr": [f"lr_{n}" for n in range(1, 12)], "p": [f"p_{number}-{stage}" for number, stage in stages]}
    for folder, own in names.items():
        for name in sorted(own, reverse=True):
            make_run(root / folder / name, "2025-01-02T00:00:00", "COMPLETED")
    (root / "lr" / "sweep.json").write_text(json.dumps({"points": [{"optim.lr": str(n)} for n in range(1, 12)]}))
    listed = [{"round": number, "stage": stage} for number, stage in stages]
    (root / "p" / "pipeline.json").write_text(json.dumps({"stages": listed}))
    make_run(root / "one", "2025-01-02T00:00:00", "COMPLETED")
    assert [row.status.run for row in table.find_rows(None)[0]] == [*names["lr"], "one", *names["p"]]
    assert [row.status.run for row in table.find_rows("p")[0]] == names["p"]


def test_a_sweep_is_a_table_of_its_values(root: Path) -> None:
    make_sweep(root / "lr")
    sweep = find_run_set("lr")
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
    assert find_run_set("lr_2") is None and find_run_set("nothing") is None


def names(rows: list[table.RunRow]) -> list[str]:
    return [row.status.run for row in rows]


def test_any_directory(root: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other" / "a", "2025-01-01T00:00:00", "COMPLETED")
    make_sweep(tmp_path / "other" / "lr")
    assert names(table.find_rows("other")[0]) == ["a", "lr_1", "lr_2"]
    assert names(table.find_rows("other/lr")[0]) == ["lr_1", "lr_2"]
    assert table.find_rows(None) == ([], 0)
    with pytest.raises(UserError, match="other/a is a single run: hpc-rl status other/a shows it"):
        table.find_rows("other/a")
    with pytest.raises(UserError, match="no directory 'gone', and no sweep or pipeline of that name in"):
        table.find_rows("gone")


def test_recent_runs_are_those_that_have_not_ended_and_the_newest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_ENDED", 2)
    for day, state in enumerate(("COMPLETED", "TIMEOUT", "STOPPED", "COMPLETED", "FAILED"), 1):
        make_run(root / f"run-{day}", f"2025-01-0{day}T00:00:00", state)
        for name in ("job.json", "status.json"):
            os.utime(root / f"run-{day}" / name, (day, day))
    make_run(root / "rendered", "", None)
    os.utime(root / "run-1" / "job.json", (9, 9))  # submitted again, and not started since
    rows, left_out = table.find_rows(None, recent=True)
    assert (names(rows), left_out) == (["rendered", "run-1", "run-4", "run-5"], 2)
    os.utime(root / "run-2" / "status.json", (7, 7))  # ended again
    rows, left_out = table.find_rows("runs", recent=True)
    assert (names(rows), left_out) == (["rendered", "run-1", "run-2", "run-5"], 2)
    for state in ("RUNNING", "REQUEUED"):
        (root / "run-3" / "status.json").write_text(f'{{"state": "{state}"}}')
        assert "run-3" in names(table.find_rows(None, recent=True)[0])
    assert len(table.find_rows(None)[0]) == 6 and table.find_rows(None)[1] == 0


def test_sort_by_any_column(root: Path) -> None:
    for name, loss in (("b", 0.5), ("a", 10.0), ("c", 2.0)):
        make_run(root / name, "2025-01-01T00:00:00", "COMPLETED", {"train/loss": loss})
        (root / name / "config.yaml").write_text(f"optim: {{lr: {loss}e-5}}\n")
    make_run(root / "none", "2025-01-02T00:00:00", "STOPPED")
    rows, _ = table.find_rows(None)
    assert names(table.ordered(rows, "run")) == ["a", "b", "c", "none"]
    assert names(table.ordered(rows, "run", reverse=True)) == ["none", "c", "b", "a"]
    for column in ("train/loss", "metric", "optim.lr"):
        assert names(table.ordered(rows, column)) == ["b", "c", "a", "none"]
        assert names(table.ordered(rows, column, reverse=True)) == ["a", "c", "b", "none"]
    with pytest.raises(UserError, match="--sort val/loss: no run has 'val/loss'; give one of run, job, state"):
        table.ordered(rows, "val/loss")


def test_filter_by_state_and_value(root: Path) -> None:
    make_sweep(root / "lr")
    make_run(root / "plain", "2025-01-01T00:00:00", "FAILED")
    (root / "plain" / "config.yaml").write_text("optim: {lr: 1.0e-05}\nmodel: {path: Qwen}\n")
    rows, _ = table.find_rows(None)
    assert names(table.filtered(rows, ["failed"])) == ["plain", "lr_2"]
    assert names(table.filtered(rows, ["state=COMPLETED"])) == ["lr_1"]
    assert names(table.filtered(rows, ["optim.lr=0.00001"])) == ["plain", "lr_1"]
    assert names(table.filtered(rows, ["optim.lr=1e-5", "FAILED"])) == ["plain"]
    assert names(table.filtered(rows, ["model.path=qwen"])) == ["plain"]
    assert table.filtered(rows, ["RUNNING"]) == []
    with pytest.raises(UserError, match=r"--filter optim.lrr=1: no run has 'optim.lrr'; give a state, or KEY=VALUE"):
        table.filtered(rows, ["optim.lrr=1"])


def test_an_evaluation_names_model_and_data_and_shows_its_score(root: Path) -> None:
    make_run(root / "eval-1", "2025-01-01T00:00:00", "COMPLETED", {"generate/score": 0.7, "eval/score": 0.75})
    job = json.loads((root / "eval-1" / "job.json").read_text())
    (root / "eval-1" / "job.json").write_text(json.dumps({**job, "kind": "eval"}))
    config = {"model": {"path": "/runs/sft-1/model"}, "data": {"files": ["d/test.jsonl", "d/hard.jsonl"]}}
    (root / "eval-1" / "config.yaml").write_text(json.dumps(config))
    rows = table.find_rows(None)[0]
    assert "eval/score 0.75  sft-1 on test, hard" in runs_table(rows)
    text = status_text(rows[0].status)
    assert "eval/score" in text and "generate/score" not in text


def test_a_lender_names_its_run_which_has_its_node_hours_beside_its_own(root: Path) -> None:
    make_run(root / "math", "2025-01-01T00:00:00", "COMPLETED")
    make_run(root / "math-lend-1", "2025-01-02T00:00:00", "COMPLETED")
    job = root / "math-lend-1" / "job.json"
    job.write_text(json.dumps({**json.loads(job.read_text()), "kind": "lend", "lends_to": str(root / "math")}))
    assert "lent" not in runs_table(table.find_rows(None)[0])
    attempt = root / "math" / "attempt-1"
    attempt.mkdir()
    write_usage(attempt, 0, 1000.0, 0)
    write_lent_nodes(attempt, [LentNode("8", "gpu17", joined=1000.0, left=2800.0)])
    rows = table.find_rows(None)[0]
    header, math, lender = (line.split() for line in runs_table(rows).splitlines())
    assert header[-3:] == ["node", "hours", "lent"] and math[-2:] == ["1.00", "0.50"]
    assert lender[-4:] == ["lends", "to", "math", "0.00"]
    assert [row.as_dict()["lent_node_hours"] for row in table.ordered(rows, "lent", reverse=True)] == [0.5, 0.0]
    assert "lends to   math  (runs/math)" in status_text(rows[1].status)
    assert "lent nodes  gpu17 (job 8): no engine now, 0 tokens, 0%" in status_text(rows[0].status)


def test_stays_of_nodes_for_environments_are_joined_by_job() -> None:
    stays = [("8", "cpu1", 0, 5), ("8", "cpu1", 0, 7), ("8", "cpu2", 4, 1000), ("9", "cpu3", 0, 1)]
    many = [(str(job), "cpu1", 1, 0) for job in range(10, 40)]
    found = tuple(LentEnvironments(*stay) for stay in [*stays, *many])
    lines = status_text(RunStatus("math", "/runs/math", "7", "RUNNING", lent_environments=found)).splitlines()
    shown = [line.removeprefix("lent nodes  ") for line in lines if line.startswith("lent nodes")]
    assert shown[:2] == [
        "2 nodes (job 8): 4 environment processes, 1,012 conversations",
        "cpu3 (job 9): no environments now, 1 conversation",
    ]
    assert len(shown) == 17 and shown[-1] == "16 other jobs: 16 environment processes, 0 conversations"
