"""How many lender jobs a run queues or cancels, for any share of waiting time, jobs and limits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.submission.auto_lending.decision import HIGH, LOW, LenderJobs, change, waited_share

shares = st.floats(0, 1)
jobs = st.builds(LenderJobs, *[st.integers(0, 40)] * 3)
limits = st.tuples(st.integers(0, 40), st.integers(1, 8))
"""Jobs that there may be, and that may be queued at a time."""


@given(st.none() | shares, jobs, limits)
def test_no_limit_is_exceeded(share: float | None, jobs: LenderJobs, limits: tuple[int, int]) -> None:
    wanted = change(share, jobs, *limits)
    assert -jobs.waiting <= wanted <= limits[1]
    assert wanted <= max(0, limits[0] - jobs.waiting - jobs.running)


@given(shares, shares, jobs, limits)
def test_more_waiting_for_engines_never_means_fewer_jobs(
    a: float, b: float, jobs: LenderJobs, limits: tuple[int, int]
) -> None:
    assert change(min(a, b), jobs, *limits) <= change(max(a, b), jobs, *limits)


@given(shares, jobs, limits, st.lists(st.integers(0, 8), min_size=40, max_size=40))
def test_with_the_same_share_it_never_turns_back(
    share: float, jobs: LenderJobs, limits: tuple[int, int], starts: list[int]
) -> None:
    """Whenever waiting jobs start, the same share never queues jobs and cancels some. At the end it changes nothing."""
    signs = set()
    for started in [*starts, 0, 0]:
        wanted = change(share, jobs, *limits)
        signs |= {wanted > 0} if wanted else set()
        waiting = jobs.waiting + wanted
        started = min(started, waiting)
        jobs = LenderJobs(waiting - started, jobs.running + started, max(jobs.ran, jobs.running))
    assert len(signs) <= 1 and change(share, jobs, *limits) == 0


@given(st.floats(LOW, HIGH, exclude_min=True, exclude_max=True), jobs, limits)
def test_between_the_thresholds_nothing_changes(share: float, jobs: LenderJobs, limits: tuple[int, int]) -> None:
    assert change(share, jobs, *limits) == min(0, max(limits[0] - jobs.waiting - jobs.running, -jobs.waiting))


@given(st.floats(0, LOW), jobs, limits)
def test_nobody_waits_without_need_unless_a_lender_has_left(
    share: float, jobs: LenderJobs, limits: tuple[int, int]
) -> None:
    assert jobs.running < jobs.ran or change(share, jobs, *limits) == -jobs.waiting


@given(st.floats(0.001, 0.9), st.integers(1, 40), st.integers(1, 8))
def test_a_run_that_lenders_make_faster_comes_to_rest(alone: float, most: int, at_a_time: int) -> None:
    """With n lenders, a run that waits for its own engines in a part of a step waits for a share of that time."""
    running, wait_s, other_s = 0, alone, 1 - alone
    history = []
    for _ in range(60):
        waited = wait_s / (1 + running)
        wanted = change(waited / (waited + other_s), LenderJobs(0, running, running), most, at_a_time)
        running += wanted
        history.append(running)
    assert history == sorted(history) and history[-1] == history[-20]


def record(gen: float | None, idle: float | None = 0.0, step: float | None = 10.0) -> dict[str, Any]:
    return {"timing_s/gen": gen, "perf/engine_idle_s": idle, "perf/time_per_step": step}


@pytest.mark.parametrize(
    ("records", "share"),
    [
        ([], None),
        ([{"step": 1}, record(None), record(3.0, None), record(1.0, step=0.0)], None),
        ([record(8.0, 2.0)], 0.8),  # the phases follow each other
        ([record(8.0, 9.0)], 0.1),  # almost all engines wait for the last response, or for environments
        ([record(0.5, 0.0)], 0.05),  # asynchronous: the engines are busy, and the next batch is there
        ([record(9.0), *[record(1.0)] * 3], 0.1),
        ([record(12.0, -1.0)], 1.0),
    ],
)
def test_the_share_is_that_of_the_newest_steps(records: list[dict[str, Any]], share: float | None) -> None:
    assert waited_share(records) == (None if share is None else pytest.approx(share))
