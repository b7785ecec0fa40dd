"""Everything that a run has recorded, read for its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.config.pipeline import ROUND
from hpc_rl.config.tree import read_options, read_yaml
from hpc_rl.formats.usage import NodeUsage, read_usage
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.evaluations import Evaluation, read_evaluation
from hpc_rl.tracking.history import History, read_history
from hpc_rl.tracking.metrics import MOST_STEPS, Record, read_thinned
from hpc_rl.tracking.page.plot import Point
from hpc_rl.tracking.planned import Expected, read_expected
from hpc_rl.tracking.points import with_points
from hpc_rl.tracking.samples import TextSample, read_samples
from hpc_rl.tracking.timeline import Timeline, read_timeline

STAGE = "stage"
STAGE_KEYS = (ROUND, STAGE)
"""Keys of `RecordedRun.swept` of the runs of a pipeline."""


@dataclass(frozen=True)
class RecordedRun:
    """One run, as its directory has it."""

    name: str
    records: list[Record]
    samples: list[TextSample]
    history: History
    usage: list[list[NodeUsage]]
    """The nodes of each attempt."""
    config: str
    """config.yaml as text."""
    options: dict[str, Any] = field(default_factory=dict)
    """The configuration: dotted key -> value."""
    evaluation: Evaluation = field(default_factory=dict)
    """eval.json; empty if the run is no evaluation."""
    timeline: Timeline | None = None
    """Of the latest step; None if the run has recorded none."""
    expected: Expected | None = None
    """What the plan of the run expected; None if there was none."""
    every: int = 1
    """The records are those of every so many steps; see `metrics.ThinnedRecords`."""
    swept: dict[str, str] = field(default_factory=dict)
    """What distinguishes the run from the others of its sweep or pipeline: swept key -> value; or round and stage."""
    kind: str = ""
    """Of its job; empty if it is not known."""
    status: str = ""
    """Its state as `hpc-rl status` shows it; empty if nobody has asked for it."""

    @property
    def state(self) -> str:
        """The state of the run: without a status, that of its last attempt."""
        return self.status or (self.history.attempts[-1].state if self.history.attempts else "")

    @property
    def has_started(self) -> bool:
        return bool(self.records or self.history.attempts)

    def points(self, key: str) -> list[Point]:
        """Return (step, value) of every record with the metric; null (NaN, Inf) is left out."""
        return [(record["step"], record[key]) for record in self.records if record.get(key) is not None]


def read_run(run: RunDir) -> RecordedRun:
    """Read a run; what is missing in its directory is empty."""
    metrics = read_thinned(run.metrics, MOST_STEPS)
    records = with_points(metrics.records, run.path)
    return RecordedRun(
        name=run.name,
        records=records,
        every=metrics.every,
        samples=read_samples(run.samples),
        history=read_history(run),
        usage=[read_usage(folder) for folder in run.attempts()],
        config=read_config(run.latest_settings),
        options=read_options(run.latest_settings),
        evaluation=read_evaluation(run),
        timeline=read_timeline(run.timeline, records[-1]["step"] if records else 0),
        expected=read_expected(run),
        kind=str(run.read_job().get("kind", "")),
    )


def read_config(path: Path) -> str:
    """Return config.yaml as text; empty if there is none, or it is no file of the run's owner."""
    try:
        return read_yaml(path, named=False).decode(errors="replace")
    except OSError:
        return ""


def differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Any]]]:
    """Return (key, value in each run) for every key whose values differ; None for a run without the key.

    Keys that a kind of run does not have are left out: each kind has its own options.
    """
    by_kind: dict[str, set[str]] = {}
    for run in runs:
        by_kind.setdefault(run.kind, set()).update(run.options)
    keys = dict.fromkeys(key for run in runs for key in run.options)
    common = set.intersection(*by_kind.values())
    values = [(key, [run.options.get(key) for run in runs]) for key in keys if key in common]
    return [(key, found) for key, found in values if any(value != found[0] for value in found)]
