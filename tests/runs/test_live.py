from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control, live
from hpc_rl.runs.live import Watched, start_phase
from hpc_rl.runs.status import RunStatus


@pytest.mark.parametrize(
    ("state", "files", "phase"),
    [
        ("PENDING", None, "waiting in the queue"),
        ("RUNNING", None, "starting: the job script prepares the nodes"),
        ("RUNNING", ["hosts"], "starting: the job script prepares the nodes"),
        ("RUNNING", ["node0-usage.jsonl", "node0.log"], "starting: the nodes connect to each other"),
        ("RUNNING", ["node0.log", "node0-rank0.log"], "starting: the program loads model and data"),
        ("RUNNING", ["node0.log", "node0-driver.log"], "starting: the program loads model and data"),
        ("COMPLETED", ["node0.log"], ""),
    ],
)
def test_what_a_run_does_before_its_first_step(tmp_path: Path, state: str, files: list[str] | None, phase: str) -> None:
    attempts = [tmp_path] if files is not None else []
    for name in files or ():
        (tmp_path / name).touch()
    found = start_phase(RunStatus("r", "r", "7", state), attempts)
    assert found.startswith(phase) and bool(found) == bool(phase)


def test_a_failed_run_is_explained_and_a_running_one_is_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.job.write_text(json.dumps({"job_id": "local-1", "host": "elsewhere", "pid": 1, "start_time": 1}))
    for state, lines in (("RUNNING", ()), ("FAILED", ["Out of memory"])):
        run.status.write_text(json.dumps({"job_id": "local-1", "attempt": 1, "state": state, "exit_code": 1}))
        seen = Watched(run, lambda _: ["Out of memory"]).look()
        assert (seen.state, seen.explanation) == (state, lines)


def test_a_run_that_is_queued_again_is_watched_until_it_has_looked_ended_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0))
    looks_ended = RunStatus("r", "r", "7", "NODE_FAIL", exit_code=1, may_return=True)
    monkeypatch.setattr(live, "status_of", lambda _: looks_ended)
    watched = Watched(RunDir(tmp_path), lambda _: ["a node was lost"])
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
    watched = Watched(run, lambda _: ())
    for new, steps in (((3, 4), [1, 2, 3, 4]), ((3,), [1, 2, 3]), ((), [1, 2, 3])):
        log(*new)
        assert [record["step"] for record in watched.look().records] == steps
