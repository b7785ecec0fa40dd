"""eval.json as tables: on the terminal, and in the report, where evaluations are compared.

Keys of eval.json: `model`, `n`, `temperature`, `reward`, `weights`, `correct`, `interval`, and `data`, a list of data
sets with `file`, `name`, `prompts`, `responses`, `failed`, `truncated`, `mean_tokens`, and `metrics`: name -> `value`,
`low`, `high`, `prompts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import read_json

Evaluation = Mapping[str, Any]
"""The contents of eval.json; empty if there is none."""
_MODEL = RunDir(Path()).model.name
_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


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

    A data set of several runs is in neighbouring rows, so that runs can be compared.
    """
    found = [(run, evaluation, data) for run, evaluation in evaluations for data in evaluation.get("data", ())]
    if not found:
        return None
    metrics = list(dict.fromkeys(name for _, _, data in found for name in data["metrics"]))
    metrics.sort(key=_order)
    sets = data_names([data["file"] for _, _, data in found])
    order = list(dict.fromkeys(sets[data["file"]] for _, _, data in found))
    found.sort(key=lambda each: order.index(sets[each[2]["file"]]))
    models = model_names([evaluation["model"] for _, evaluation, _ in found])
    rows = [
        [
            sets[data["file"]],
            models[evaluation["model"]],
            run,
            f"{data['prompts']:,}",
            str(evaluation["n"]),
            f"{evaluation['temperature']:g}",
        ]
        + [_cell(data["metrics"].get(name)) for name in metrics]
        + [f"{100 * data['truncated']:.1f} %", f"{data['failed']:,}"]
        for run, evaluation, data in found
    ]
    columns = ["Data", "Model", "Run", "Prompts", "n", "Temperature", *metrics, "Truncated", "Failed rewards"]
    return EvaluationTable(columns, rows, f"In brackets: {found[0][1]['interval']}.")


def result_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return an evaluation as metrics: those of each data set, and `eval/score`, the mean score of the data sets."""
    sets = {data["name"]: data["metrics"] for data in evaluation["data"]}
    found = {f"eval/{name}/{key}": one["value"] for name, own in sets.items() for key, one in own.items()}
    scores = [metrics["score"]["value"] for metrics in sets.values() if "score" in metrics]
    return {"eval/score": fmean(scores), **found} if scores else found


def data_names(files: Sequence[str]) -> dict[str, str]:
    """Return a short name for each data file: that of the file, and as many folders as distinguish it from others."""
    names = _short_names({file: Path(file).parts for file in files})
    plain = {file: name.rpartition(".")[0] if name.endswith(_SUFFIXES) else name for file, name in names.items()}
    return plain if len(set(plain.values())) == len(set(names.values())) else names


def model_names(models: Sequence[str]) -> dict[str, str]:
    """Return a short name for each model: of the model of a run, the name of the run."""
    paths = {model: Path(model) for model in models}
    return _short_names({name: (path.parent if path.name == _MODEL else path).parts for name, path in paths.items()})


def _short_names(parts: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the shortest ends of some paths that differ if the paths do. A path and its end are the same path."""
    found = {}
    for name, own in parts.items():
        others = [other for other in parts.values() if other[-len(own) :] != own[-len(other) :]]
        lengths = range(1, len(own) + 1)
        length = next((n for n in lengths if all(other[-n:] != own[-n:] for other in others)), len(own))
        found[name] = "/".join(own[-length:]).replace("//", "/")
    return found


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
