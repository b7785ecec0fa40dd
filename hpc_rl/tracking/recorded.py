"""Everything that a run has written down, read for its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.host.usage import NodeUsage, read_usage
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.attempts import History, read_history
from hpc_rl.tracking.metrics import Record, read_metrics

Point = tuple[float, float]


@dataclass(frozen=True)
class TextSample:
    """A response to a validation prompt."""

    step: int
    prompt: str
    response: str
    answer: str
    score: float | None


@dataclass(frozen=True)
class Recorded:
    """One run."""

    name: str
    records: list[Record]
    samples: list[TextSample]
    history: History
    usage: list[list[NodeUsage]]
    """The nodes of each attempt."""
    config: str
    """YAML."""

    def points(self, key: str) -> list[Point]:
        """(step, value) where a record has the metric; null (NaN, Inf) is left out."""
        return [(record["step"], record[key]) for record in self.records if record.get(key) is not None]

    def with_history(self, history: History) -> Recorded:
        return replace(self, history=history)

    def options(self) -> dict[str, Any]:
        """The configuration as dotted keys."""
        try:
            return flat(yaml.safe_load(self.config) or {})
        except yaml.YAMLError:
            return {}


def read_run(run: RunDir) -> Recorded:
    """Nothing of it needs to be there."""
    return Recorded(
        name=run.name,
        records=read_metrics(run.metrics),
        samples=read_samples(run.samples),
        history=read_history(run),
        usage=[read_usage(folder) for folder in run.attempts()],
        config=run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else "",
    )


def read_samples(path: Path) -> list[TextSample]:
    """By step; a resumed run takes back the steps that it does again. Half-written lines are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    samples: dict[tuple[int, str], TextSample] = {}
    for line in lines:
        sample = _parse_sample(line)
        if sample is None:
            continue
        while samples and next(reversed(samples))[0] > sample.step:  # steps are in order, so the later ones are last
            samples.popitem()
        samples[sample.step, sample.prompt] = sample
    return list(samples.values())


def _parse_sample(line: bytes) -> TextSample | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    score = row.get("score")
    return TextSample(
        step=row["step"],
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        answer="" if row.get("answer") is None else str(row["answer"]),
        score=float(score) if isinstance(score, int | float) else None,
    )


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """A tree of mappings as dotted keys; lists and empty mappings are values."""
    if not isinstance(tree, dict) or not tree:
        return {above: tree} if above else {}
    return {
        key: value
        for name, below in tree.items()
        for key, value in flat(below, f"{above}.{name}" if above else str(name)).items()
    }


def differences(options: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """(key, value of each) where not all are the same; None where one does not have the key."""
    keys = dict.fromkeys(key for each in options for key in each)
    values = [(key, [each.get(key) for each in options]) for key in keys]
    return [(key, found) for key, found in values if any(value != found[0] for value in found)]
