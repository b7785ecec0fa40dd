"""How many lender jobs to queue or to cancel. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HIGH, LOW = 0.3, 0.1
"""From the first share of waiting time on, lenders are queued. Down to the second one, those that wait are cancelled.
Between them nothing changes, so that a lender that helps is not cancelled because it does."""
STEPS = 3
"""The newest steps, of which the share is the mean."""


@dataclass(frozen=True)
class LenderJobs:
    """The lender jobs that a run has queued, and that have not ended."""

    waiting: int
    running: int
    ran: int
    """Those that were running when the newest step was recorded."""


def change(share: float | None, jobs: LenderJobs, most: int, at_a_time: int) -> int:
    """Return how many jobs to queue, or minus the number of waiting ones to cancel.

    Args:
        share: see `waited_share`; None if nothing was measured yet.
        most: jobs that there may be, waiting and running together.
        at_a_time: jobs that may be queued now.
    """
    # After a lender has left, the share was measured with more engines than there are.
    if share is not None and share <= LOW and jobs.running >= jobs.ran:
        return -jobs.waiting
    room = most - jobs.waiting - jobs.running
    if room < 0:  # the limit was lowered
        return max(room, -jobs.waiting)
    return min(room, at_a_time) if share is not None and share >= HIGH else 0


def waited_share(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the part of the newest steps in which the run waited for its engines and did nothing else.

    It waits for responses in the phase `gen`. Not all of this time is that of the engines: they are idle while
    environments and rewards compute, and most of them while one generates the last long response. So no more than the
    time that an engine was busy, on average, counts.

    Args:
        records: those of metrics.jsonl, one per step, in order.

    Returns:
        None if no step has the measurements.
    """
    found = [share for record in records if (share := _share_of(record)) is not None][-STEPS:]
    return sum(found) / len(found) if found else None


def _share_of(record: Mapping[str, Any]) -> float | None:
    step_s, idle_s, gen_s = (record.get(name) for name in ("perf/time_per_step", "perf/engine_idle_s", "timing_s/gen"))
    if step_s is None or idle_s is None or gen_s is None or step_s <= 0:
        return None
    return float(min(1.0, max(0.0, min(gen_s, step_s - idle_s) / step_s)))
