"""Scores of checkpoints that other jobs write beside metrics.jsonl, and the readers that merge them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import status_of
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.tracking.page.charts import plots_of_run
from hpc_rl.tracking.points import add_point, points_file, read_points, scored, with_points
from hpc_rl.tracking.recorded import read_run


def make_run(folder: Path, steps: Sequence[int]) -> RunDir:
    lines = [json.dumps({"step": step, "total_steps": 90, "time": 1.0 * step, "train/loss": step}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return RunDir(folder)


def test_scores_are_at_the_steps_of_their_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1, 2, 3])
    before = run.metrics.read_bytes()
    add_point(points_file(tmp_path, "aa", "one"), 2, 7, {"eval/score": 0.5, "eval/a/score": 0.5})
    add_point(points_file(tmp_path, "aa", "two"), 3, 8, {"eval/score": 0.75, "eval/a/score": float("nan")})
    add_point(points_file(tmp_path, "bb", "one"), 2, 7, {"eval/b/score": 0.25})
    assert scored(tmp_path, "aa") == {(2, 7), (3, 8)} and scored(tmp_path, "bb") == {(2, 7)}
    first, second, third = with_points(read_metrics(run.metrics), tmp_path)
    assert first == {"step": 1, "total_steps": 90, "time": 1.0, "train/loss": 1}
    assert second == {
        **{"step": 2, "total_steps": 90, "time": 2.0, "train/loss": 2},
        **{"eval/score": 0.5, "eval/a/score": 0.5, "eval/b/score": 0.25},
    }
    assert third["eval/score"] == 0.75 and third["eval/a/score"] is None
    shown = read_run(run)
    assert shown.points("eval/score") == [(2, 0.5), (3, 0.75)] and run.metrics.read_bytes() == before
    titles = {figure.title for group in plots_of_run(shown) for figure in group.figures}
    assert titles == {"Loss", "Score of checkpoints"}


def test_a_run_that_resumes_before_a_checkpoint_takes_its_score_along(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1, 2])
    for step, score in ((2, 0.2), (4, 0.4), (6, 0.6), (3, 0.3)):
        add_point(points_file(tmp_path, "aa", "one"), step, 7, {"eval/score": score})
    assert {step: values["eval/score"] for step, values in read_points(tmp_path).items()} == {2: 0.2, 3: 0.3}
    assert [record.get("eval/score") for record in with_points(read_metrics(run.metrics), tmp_path)] == [None, 0.2]
    assert scored(tmp_path, "aa") >= {(4, 7)} and with_points([], tmp_path) == []


def test_scores_of_an_abandoned_course_are_discarded_in_all_files(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1, 2, 3, 4])
    for job, step, saved, score in (("b", 2, 20, 0.2), ("b", 4, 40, 0.4), ("a", 2, 20, 0.1), ("a", 3, 50, 0.3)):
        add_point(points_file(tmp_path, job, "one"), step, saved, {"eval/score": score, f"eval/{job}/score": score})
    late = points_file(tmp_path, "b", "two")
    add_point(late, 4, 30, {"eval/score": 0.5})  # saved before the run has resumed, scored after that
    assert [record.get("eval/score") for record in with_points(read_metrics(run.metrics), tmp_path)] == [
        *(None, 0.2, 0.3, None)
    ]
    assert read_points(tmp_path)[2] == {"eval/score": 0.2, "eval/a/score": 0.1, "eval/b/score": 0.2}
    add_point(late, 4, 60, {"eval/score": 0.6})
    assert read_points(tmp_path)[4] == {"eval/score": 0.6}


def test_steps_of_a_long_run_that_are_not_read_have_their_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1, 11, 21])
    add_point(points_file(tmp_path, "aa", "one"), 15, 7, {"eval/score": 0.5})
    found = with_points(read_metrics(run.metrics), tmp_path)
    assert [record["step"] for record in found] == [1, 11, 15, 21]
    assert found[2] == {"step": 15, "total_steps": 90, "time": 11.0, "eval/score": 0.5}


def test_the_state_has_the_newest_score(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1, 2, 3])
    add_point(points_file(tmp_path, "aa", "one"), 1, 7, {"eval/score": 0.5})
    add_point(points_file(tmp_path, "aa", "one"), 2, 8, {"eval/score": 0.75})
    add_point(points_file(tmp_path, "aa", "one"), 9, 9, {"eval/score": 1.0})
    now = status_of(run)
    assert (now.step, now.metrics["eval/score"], now.metrics["train/loss"]) == (3, 0.75, 3)
    (tmp_path / "metrics-eval-aa-one.jsonl").write_text("half a li")
    assert "eval/score" not in status_of(run).metrics
