from __future__ import annotations

from pathlib import Path

from hpc_rl.runs.history import full_history, history, with_accounts
from hpc_rl.slurm.accounting import Start
from hpc_rl.tracking.attempts import KILLED, Attempt, History
from tests.tracking.runs import BEGAN, make_run


def attempt(number: int, state: str, began: float) -> Attempt:
    return Attempt(number, "7", state, None, began, began + 3000, 2, 6000 / 3600)


def test_attempts_that_were_killed_get_slurms_word() -> None:
    found = History(
        (attempt(1, KILLED, BEGAN + 5), attempt(2, "FAILED", BEGAN + 9000), attempt(3, KILLED, BEGAN + 20000))
    )
    starts = [
        Start("7", "NODE_FAIL", 1, BEGAN, BEGAN + 3600, 4),
        Start("7", "COMPLETED", 0, BEGAN + 8990, BEGAN + 9900, 4),
        Start("7", "RUNNING", None, BEGAN + 19990, None, 4),
        Start("8", "TIMEOUT", 0, BEGAN + 19999, BEGAN + 23000, 4),
    ]
    lost, failed, running = with_accounts(found, starts).attempts
    assert (lost.state, lost.exit_code, lost.ended, lost.nodes, lost.node_hours) == (
        *("NODE_FAIL", 1, BEGAN + 3600, 4),
        4.0,
    )
    assert (failed, running) == found.attempts[1:]


def test_where_there_is_no_accounting_nothing_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path, exit_code=None)
    assert full_history(run) == history(run)
