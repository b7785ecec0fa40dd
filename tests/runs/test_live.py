from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.formats.offer import LentNode, write_lent_nodes
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control, live
from hpc_rl.runs.live import WatchedRun
from hpc_rl.runs.status import RunStatus
from tests.tracking.runs import BEGAN, write_usage


def test_a_failed_run_is_explained_and_a_running_one_is_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.job.write_text(json.dumps({"job_id": "local-1", "host": "elsewhere", "pid": 1, "start_time": 1}))
    for state, lines in (("RUNNING", ()), ("FAILED", ["Out of memory"])):
        run.status.write_text(json.dumps({"job_id": "local-1", "attempt": 1, "state": state, "exit_code": 1}))
        seen = WatchedRun(run, lambda _: ["Out of memory"]).look()
        assert (seen.state, seen.explanation) == (state, lines)


def test_a_run_that_is_queued_again_is_watched_until_it_has_looked_ended_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0))
    looks_ended = RunStatus("r", "r", "7", "NODE_FAIL", exit_code=1, may_return=True)
    monkeypatch.setattr(live, "status_of", lambda _: looks_ended)
    watched = WatchedRun(RunDir(tmp_path), lambda _: ["a node was lost"])
    seen = []
    for now in range(200):
        clock.now = float(now)
        seen.append((watched.look().explanation, watched.active))
    ended = seen.index((["a node was lost"], False))
    assert 60 <= ended <= 60 + control.STATE_POLL_S[1] and set(seen[:ended]) == {((), True)}


def test_a_resumed_run_discards_later_steps(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.job.write_text(json.dumps({"job_id": "local-1", "host": "elsewhere", "pid": 1, "start_time": 1}))
    run.status.write_text(json.dumps({"job_id": "local-1", "attempt": 1, "state": "RUNNING", "exit_code": None}))

    def log(*steps: int) -> None:
        with run.metrics.open("a") as file:
            file.writelines(json.dumps({"step": step, "total_steps": 9}) + "\n" for step in steps)

    log(1, 2)
    watched = WatchedRun(run, lambda _: ())
    for new, steps in (((3, 4), [1, 2, 3, 4]), ((3,), [1, 2, 3]), ((), [1, 2, 3])):
        log(*new)
        assert [record["step"] for record in watched.look().records] == steps


def test_a_lender_names_its_run_which_has_its_nodes(tmp_path: Path) -> None:
    math, lender = RunDir(tmp_path / "math"), RunDir(tmp_path / "math-lend-1")
    for run, more in ((math, {}), (lender, {"lends_to": str(math.path)})):
        attempt = run.path / "attempt-1"
        attempt.mkdir(parents=True)
        write_usage(attempt, 0, BEGAN, 0)
        run.job.write_text(json.dumps({"job_id": "local-1", "host": "elsewhere", "pid": 1, "start_time": 1, **more}))
        state = {"job_id": "local-1", "attempt": 1, "state": "COMPLETED", "exit_code": 0}
        run.status.write_text(json.dumps(state))
    write_lent_nodes(math.path / "attempt-1", [LentNode("41", "gpu\x1b17", joined=BEGAN, left=BEGAN + 1800)])
    seen = WatchedRun(math, lambda _: ()).look()
    assert "1.00 + 0.50 lent node hours" in seen.facts
    assert [str(node) for node in seen.lent_nodes] == [r"gpu\x1b17 (job 41): no engine now, 0 tokens, 0%"]
    seen = WatchedRun(lender, lambda _: ()).look()
    assert "lends to math" in seen.facts and seen.phase == "it has no steps of its own" and not seen.lent_nodes


def test_the_name_of_the_run_that_has_the_nodes_is_text(tmp_path: Path) -> None:
    lender = RunDir(tmp_path)
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1/node0.log").touch()
    job = {"job_id": "local-1", "host": "elsewhere", "pid": 1, "start_time": 1, "lends_to": "/runs/math\x1b[2J\x07"}
    lender.job.write_text(json.dumps(job))
    lender.write_status("local-1", 1, "RUNNING", None)
    assert WatchedRun(lender, lambda _: ()).look().phase == r"its nodes help run math\x1b[2J\x07, or wait for it"
