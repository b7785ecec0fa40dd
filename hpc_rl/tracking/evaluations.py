"""eval.json as tables: on the terminal, and in the report, where evaluations are compared.

Keys of eval.json: `model`, `n`, `temperature`, `reward`, `weights`, `correct`, `interval`, and `data`, a list of data
sets with `file`, `name`, `prompts`, `responses`, `failed`, `truncated`, `mean_tokens`, and `metrics`: name -> `value`,
`low`, `high`, `prompts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.host.files import read_json
from hpc_rl.run_dir import RunDir

Evaluation = Mapping[str, Any]
"""The contents of eval.json; empty if there is none."""


@dataclass(frozen=True)
class EvaluationTable:
    """One row for each data set of each run, one column for each metric that any of them has."""

    columns: list[str]
    rows: list[list[str]]
    note: str
    """How to read the intervals."""


def read_evaluation(run: RunDir) -> Evaluation:
    """Read eval.json of a run; empty if there is none. A file of the user's own program with this name is another."""
    found = read_json(run.evaluation)
    if run.read_job().get("kind", "eval") != "eval":
        return {}
    try:
        evaluation_text([(run.name, found)])
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return {}
    return found


def evaluation_table(evaluations: Sequence[tuple[str, Evaluation]]) -> EvaluationTable | None:
    """Tabulate the evaluations of some runs, given by name; None if there is none.

    The data sets with the same name are next to each other, so that runs can be compared.
    """
    found = [(run, evaluation, data) for run, evaluation in evaluations for data in evaluation.get("data", ())]
    if not found:
        return None
    metrics = list(dict.fromkeys(name for _, _, data in found for name in data["metrics"]))
    metrics.sort(key=_order)
    names = list(dict.fromkeys(data["name"] for _, _, data in found))
    found.sort(key=lambda each: names.index(each[2]["name"]))
    rows = [
        [data["name"], run, f"{data['prompts']:,}", str(evaluation["n"]), f"{evaluation['temperature']:g}"]
        + [_cell(data["metrics"].get(name)) for name in metrics]
        + [f"{100 * data['truncated']:.1f} %", f"{data['failed']:,}"]
        for run, evaluation, data in found
    ]
    columns = ["Data", "Run", "Prompts", "n", "Temperature", *metrics, "Truncated", "Failed rewards"]
    return EvaluationTable(columns, rows, f"In brackets: {found[0][1]['interval']}.")


def evaluation_text(evaluations: Sequence[tuple[str, Evaluation]]) -> str:
    """Return the evaluations of some runs as text; empty if there is none."""
    table = evaluation_table(evaluations)
    if table is None:
        return ""
    rows = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, table.note])


def _cell(metric: Mapping[str, float] | None) -> str:
    return "–" if metric is None else f"{metric['value']:.3f} [{metric['low']:.3f}, {metric['high']:.3f}]"


def _order(name: str) -> tuple[str, int]:
    """Sort by kind (score, pass, maj), then by k."""
    kind, _, k = name.partition("@")
    return {"score": "0", "pass": "1", "maj": "2"}.get(kind, kind), int(k) if k.isdigit() else 0
