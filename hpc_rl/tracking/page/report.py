"""report.html: one run, or several side by side, on one page that any browser shows without a network."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.software.secrets import hidden
from hpc_rl.system.files import replacing
from hpc_rl.tracking.evaluations import evaluation_table
from hpc_rl.tracking.formatting import number
from hpc_rl.tracking.history import ended_with
from hpc_rl.tracking.page.charts import PlotGroup, phase_medians, plots_of_run, plots_of_runs
from hpc_rl.tracking.page.plot import as_script_data, is_binned, plot_data
from hpc_rl.tracking.page.sweep_charts import best_first, is_pipeline, sweep_plots, swept_keys
from hpc_rl.tracking.recorded import RecordedRun, differences, read_run
from hpc_rl.tracking.samples import excerpts_of_run, excerpts_of_runs
from hpc_rl.tracking.summary import run_summary
from hpc_rl.tracking.timeline import rows, ticks

UPLOT = "uplot-1.6.32.min"
"""The plotting library as published: file names of its script and its style sheet."""
_PAGE = Path(__file__).parent
_OPEN_DIFFERENCES = 12
"""A longer list of differing options is folded."""
_MOST_COLUMNS = 6
"""More runs than that are in several tables, each as wide as the page."""


def report_end(run: RunDir, exit_code: int) -> str:
    """Write the report of a run that is about to end with this exit code, in the process that trained it.

    Returns:
        a line with its path, or with the reason why there is none: a missing report does not change how the run ends.
    """
    recorded = read_run(run)
    ended = replace(recorded, history=ended_with(recorded.history, exit_code, time.time()))
    try:
        return f"report: {write_page([ended], run.report)}"
    except UserError as error:
        return f"warning: no report was written: {error}"


@contextmanager
def failure_reported(run: RunDir) -> Iterator[None]:
    """Write a report too if the run fails after its first step."""
    try:
        yield
    except Exception as error:
        if run.metrics.exists():
            report_end(run, error.exit_code if isinstance(error, UserError) else 1)
        raise


def write_page(runs: Sequence[RecordedRun], path: Path, refresh_s: float | None = None) -> Path:
    """Write a page about these runs, whole or not at all; return its path.

    Args:
        refresh_s: let the page reload itself at this interval; None: it is complete.

    Raises:
        UserError: a run has nothing to show, or the file cannot be written.
    """
    for run in runs:
        if not run.has_started:
            raise UserError(f"run {run.name} has nothing to report yet: it has not started")
    page = hidden(render_page(runs, refresh_s))  # a program may have printed one
    try:
        with replacing(path) as partial, partial.open("xb") as file:
            # Replace invalid characters, so that a damaged text does not prevent the report.
            file.write(page.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return path


def render_page(runs: Sequence[RecordedRun], refresh_s: float | None = None) -> str:
    """Render the page. Text of a run is escaped, and the page's policy lets no script run but its own."""
    several, swept = len(runs) > 1, swept_keys(runs)
    sorts = bool(swept) and not is_pipeline(runs)
    runs = best_first(runs) if sorts else runs
    groups = plots_of_runs(runs) if several else plots_of_run(runs[0])
    sweep_groups = sweep_plots(runs) if several else []
    plots = [figure.plot for group in [*sweep_groups, *groups] for figure in group.figures]
    data = plot_data(plots)
    scripts = [(_PAGE / name).read_text() for name in (f"{UPLOT}.js", "script.js")]
    differing = differences(runs)
    summaries = [run_summary(run) for run in runs]
    template = Environment(autoescape=True, trim_blocks=True).from_string((_PAGE / "page.html.j2").read_text())
    return template.render(
        title=_title(runs),
        written=time.strftime("%Y-%m-%d %H:%M"),
        refresh_s=None if refresh_s is None else round(refresh_s),
        runs=summaries,
        results=_labels([summary.results for summary in summaries]),
        speeds=_labels([summary.speeds for summary in summaries]),
        swept_keys=swept,
        best_is_first=sorts,
        swept=[[run.swept.get(key, "–") for key in swept] for run in runs],
        columns=_MOST_COLUMNS,
        differences=[(key, [_shown(run.options, key) for run in runs]) for key, _ in differing],
        opens=len(differing) * -(-len(runs) // _MOST_COLUMNS) <= _OPEN_DIFFERENCES,
        several_kinds=len({run.kind for run in runs}) > 1,
        shared_config=_shared(runs) if several else "",
        groups=groups,
        sweep_groups=sweep_groups,
        notes=_notes(groups, is_binned(plots, data)),
        evaluation=evaluation_table([(run.name, run.evaluation) for run in runs]),
        phases=[(name, ["–" if v is None else number(v) for v in values]) for name, values in phase_medians(runs)],
        timeline=None if several else _timeline(runs[0]),
        samples=excerpts_of_runs([(r.name, r.samples) for r in runs]) if several else excerpts_of_run(runs[0].samples),
        style=Markup((_PAGE / f"{UPLOT}.css").read_text() + (_PAGE / "style.css").read_text()),
        data=Markup(as_script_data(data)),
        licence=Markup((_PAGE / "uplot-LICENSE.txt").read_text()),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts],
    )


def _title(runs: Sequence[RecordedRun]) -> str:
    names = [run.name for run in runs]
    sweeps = {name.rpartition("_")[0] for name in names}
    if len(sweeps) == 1 and all(run.swept for run in runs):
        return f"{'pipeline' if is_pipeline(runs) else 'sweep'} {sweeps.pop()}"
    return " · ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} other runs"


def _labels(tables: Sequence[dict[str, str]]) -> list[str]:
    """Return the labels for which any run has a value."""
    return [label for label in tables[0] if any(table[label] for table in tables)]


def _shared(runs: Sequence[RecordedRun]) -> str:
    """Return the options that all runs have in common, as YAML with dotted keys; empty for runs of several kinds."""
    differing = {key for key, _ in differences(runs)}
    shared = {key: value for key, value in runs[0].options.items() if key not in differing}
    return yaml.safe_dump(shared, sort_keys=False) if shared and len({run.kind for run in runs}) == 1 else ""


def _timeline(run: RecordedRun) -> dict[str, Any] | None:
    found = run.timeline
    if found is None or not found.phases:
        return None
    return {"step": found.step, "rows": rows(found), "ticks": ticks(found.seconds)}


def _notes(groups: Sequence[PlotGroup], binned: bool) -> list[str]:
    """Explain the signs in the plots, if there are any."""
    marked = any(figure.plot.marks for group in groups for figure in group.figures)
    notes = {
        "Upright dashed lines: a new attempt resumed the run there.": marked,
        "Long runs: each point is the mean of several steps; the band, if there is one, spans their lowest and highest "
        "value.": binned,
    }
    return [note for note, applies in notes.items() if applies]


def _shown(options: dict[str, Any], key: str) -> str:
    value = options.get(key, "–")
    return "null" if value is None else str(value)
