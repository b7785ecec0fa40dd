from __future__ import annotations

import json
import os
from pathlib import Path

from hpc_rl.formats.offer import LentNode, write_lent_nodes
from hpc_rl.slurm.accounting import JobStart
from hpc_rl.tracking.history import KILLED, Attempt, History, ended_with, read_history, with_accounting
from tests.tracking.runs import BEGAN, make_run, write_usage


def test_attempts_requeues_and_node_hours(tmp_path: Path) -> None:
    found = read_history(make_run(tmp_path, attempts=3, nodes=2))
    assert [(a.number, a.state, a.exit_code) for a in found.attempts] == [
        (1, "REQUEUED", 75),
        (2, "REQUEUED", 75),
        (3, "COMPLETED", 0),
    ]
    assert found.requeues == 2 and found.node_hours == 6.0
    first = found.attempts[0]
    assert (first.job_id, first.began, first.seconds, first.nodes, first.node_hours) == ("7", BEGAN, 3600, 2, 2.0)


def test_how_an_attempt_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, attempts=0)
    endings: list[tuple[int | None, int | None, str]] = [
        (75, 75, "STOPPED"),
        (1, 0, "FAILED"),
        (None, 0, KILLED),
        (137, 143, "FAILED"),
        (143, 143, KILLED),
    ]
    for number, (first, second, state) in enumerate(endings, 1):
        attempt = run.path / f"attempt-{number}"
        attempt.mkdir()
        for rank, code in enumerate((first, second)):
            write_usage(attempt, rank, BEGAN, code, job_id=str(number))
        assert read_history(run).attempts[-1].state == state
    assert read_history(run).requeues == 0
    run.status.write_text(json.dumps({"job_id": "5", "attempt": 5, "state": "RUNNING", "exit_code": None}))
    assert [a.state for a in read_history(run).attempts] == ["STOPPED", "FAILED", KILLED, "FAILED", "RUNNING"]


def test_without_usage_the_logs_times_count(tmp_path: Path) -> None:
    run = make_run(tmp_path, attempts=0)
    attempt = run.path / "attempt-1"
    attempt.mkdir()
    assert read_history(run).attempts[0].began is None and read_history(run).node_hours == 0
    for number, name in enumerate(("node0.log", "node0-rank0.log", "node1.log", "other.txt")):
        (attempt / name).touch()
        os.utime(attempt / name, (BEGAN + 1800 * number, BEGAN + 1800 * number))
    (found,) = read_history(run).attempts
    assert (found.began, found.seconds, found.nodes, found.node_hours) == (BEGAN, 3600, 2, 2.0)


def test_a_run_without_attempts(tmp_path: Path) -> None:
    found = read_history(make_run(tmp_path, attempts=0))
    assert found.attempts == () and found.node_hours == 0 == found.requeues
    assert ended_with(found, 0, BEGAN) == found


def test_the_end_of_an_attempt_that_is_about_to_end(tmp_path: Path) -> None:
    running = read_history(make_run(tmp_path, nodes=2, exit_code=None))
    last = ended_with(running, 75, BEGAN + 7200).attempts[-1]
    assert (last.state, last.exit_code, last.seconds, last.node_hours) == ("STOPPED", 75, 7200, 4.0)


def test_killed_attempts_are_completed_by_accounting() -> None:
    def attempt(number: int, state: str, began: float) -> Attempt:
        return Attempt(number, "7", state, None, began, began + 3000, 2, 6000 / 3600)

    found = History(
        (attempt(1, KILLED, BEGAN + 5), attempt(2, "FAILED", BEGAN + 9000), attempt(3, KILLED, BEGAN + 20000))
    )
    starts = [
        JobStart("7", "NODE_FAIL", 1, BEGAN, BEGAN + 3600, 4),
        JobStart("7", "COMPLETED", 0, BEGAN + 8990, BEGAN + 9900, 4),
        JobStart("7", "RUNNING", None, BEGAN + 19990, None, 4),
        JobStart("8", "TIMEOUT", 0, BEGAN + 19999, BEGAN + 23000, 4),
    ]
    lost, failed, running = with_accounting(found, starts).attempts
    assert (lost.state, lost.exit_code, lost.ended, lost.nodes, lost.node_hours) == (
        *("NODE_FAIL", 1, BEGAN + 3600, 4),
        4.0,
    )
    assert (failed, running) == found.attempts[1:]


def test_a_start_that_began_more_than_a_second_later_is_another_one() -> None:
    killed = Attempt(1, "7", KILLED, None, BEGAN, BEGAN + 10, 1, 0.0)
    for late, state in ((1.0, "TIMEOUT"), (1.5, KILLED)):
        start = JobStart("7", "TIMEOUT", 0, BEGAN + late, BEGAN + 20, 1)
        assert with_accounting(History((killed,)), [start]).attempts[0].state == state


def test_lent_nodes_have_node_hours_of_their_own(tmp_path: Path) -> None:
    """One that was there at the end left with the attempt; one that came after its last sample has none."""
    run = make_run(tmp_path, attempts=2)
    lent = [
        LentNode("41", "a", joined=BEGAN + 600, left=BEGAN + 2400),
        LentNode("42", "b", joined=BEGAN + 1800),
        LentNode("43", "c", joined=BEGAN + 3601),
    ]
    write_lent_nodes(run.path / "attempt-1", lent)
    found = read_history(run)
    assert [attempt.lent_hours for attempt in found.attempts] == [1.0, 0.0]
    assert (found.node_hours, found.lent_hours) == (4.0, 1.0)
