from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hpc_rl.slurm.accounting import JobStart, read_starts

# Slurm 22.05.8 with slurmdbd: sacct -X -n -P --duplicates -o JobIDRaw,State,ExitCode,Start,End,NNodes -j 1
# after `scontrol requeue 1`, with the clock in UTC.
RECORDED = """\
1|REQUEUED|0:0|2026-11-21T10:33:20|2026-11-21T10:33:36|2
1|COMPLETED|0:0|2026-11-21T10:33:49|2026-11-21T10:34:06|2
"""


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_every_start_of_a_job() -> None:
    first, second = read_starts(RECORDED)
    assert first == JobStart("1", "REQUEUED", 0, 1795257200.0, 1795257216.0, 2)
    assert (second.state, second.seconds) == ("COMPLETED", 17.0)
    assert read_starts("".join(reversed(RECORDED.splitlines(keepends=True)))) == [first, second]


def test_a_start_that_still_runs_and_one_that_never_came() -> None:
    """Unknown stands for an event that has not happened (sacct's manual page)."""
    running, *others = read_starts("7|RUNNING|0:0|2026-11-21T10:33:20|Unknown|2\n8|PENDING|0:0|Unknown|Unknown|2\n")
    assert (running.ended, running.seconds) == (None, 0.0) and others == []
    (cancelled,) = read_starts("7|CANCELLED by 0|0:15|2026-11-21T10:33:20|2026-11-21T10:33:21|1\n")
    assert (cancelled.state, cancelled.exit_code) == ("CANCELLED", 143)


@pytest.mark.parametrize("text", ["", "\n", "sacct: error: no such option\n", "1|2|3\n"])
def test_no_answer_is_no_start(text: str) -> None:
    assert read_starts(text) == []
