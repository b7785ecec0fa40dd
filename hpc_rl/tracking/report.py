"""report.html: a run, or several side by side, on one page that any browser shows without a network."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from hpc_rl.errors import UserError
from hpc_rl.host.files import replacing
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.attempts import ended_with
from hpc_rl.tracking.charts import Section, compared, phase_medians, sections
from hpc_rl.tracking.formatting import number
from hpc_rl.tracking.recorded import Recorded, differences, read_run
from hpc_rl.tracking.samples import samples_of_one, samples_of_several
from hpc_rl.tracking.summary import run_summary

MOST_RUNS = 8
"""More colours than that cannot be told apart."""
_PAGE = Path(__file__).parent / "page"


def report_end(run: RunDir, exit_code: int) -> str:
    """Write the report of a run that is about to end with this exit code, in the process that trained it.

    Returns:
        a line that says where it is, or why there is none: how the run ends does not depend on it.
    """
    recorded = read_run(run)
    ended = recorded.with_history(ended_with(recorded.history, exit_code, time.time()))
    try:
        return f"report: {write_page([ended], run.report)}"
    except UserError as error:
        return f"warning: there is no report: {error}"


@contextmanager
def failure_reported(run: RunDir) -> Iterator[None]:
    """Of a run that fails after its first step there is a report too."""
    try:
        yield
    except Exception as error:
        if run.metrics.exists():
            report_end(run, error.exit_code if isinstance(error, UserError) else 1)
        raise


def write_page(runs: Sequence[Recorded], path: Path) -> Path:
    """Write a page on these runs, whole or not at all; its path.

    Raises:
        UserError: there is nothing to show of a run, or the file cannot be written.
    """
    for run in runs:
        if not run.records and not run.history.attempts:
            raise UserError(f"run {run.name} has nothing to report yet: it has not started")
    page = render_page(runs)
    try:
        with replacing(path) as partial:
            # Half a character of a broken text is no reason to have no report.
            partial.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return path


def render_page(runs: Sequence[Recorded]) -> str:
    """The page as text. Whatever comes from a run is escaped, and no script but the page's own may run in it."""
    several = len(runs) > 1
    script = (_PAGE / "script.js").read_text()
    summaries = [run_summary(run) for run in runs]
    shown = compared(runs) if several else sections(runs[0])
    labels = list(dict.fromkeys(label for summary in summaries for label in summary.by_label))
    template = Environment(autoescape=True, trim_blocks=True).from_string((_PAGE / "page.html.j2").read_text())
    return template.render(
        title=" · ".join(run.name for run in runs),
        written=time.strftime("%Y-%m-%d %H:%M"),
        runs=summaries,
        labels=labels,
        differences=[(key, [_shown(value) for value in values]) for key, values in _differences(runs)],
        sections=shown,
        notes=_notes(shown),
        phases=[
            (name, [_seconds(value) for value in values]) for name, values in (phase_medians(runs) if several else [])
        ],
        samples=samples_of_several(runs) if several else samples_of_one(runs[0]),
        style=Markup((_PAGE / "style.css").read_text()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _differences(runs: Sequence[Recorded]) -> list[tuple[str, list[Any]]]:
    return differences([run.options() for run in runs]) if len(runs) > 1 else []


def _notes(shown: Sequence[Section]) -> list[str]:
    """What the plots' extra signs mean, where there are any."""
    drawn = "".join(figure.svg for section in shown for figure in section.figures)
    signs = {
        'class="mark"': "Upright lines: a new attempt went on from there.",
        'class="band': "Long runs: each point is the mean of some steps, and its band goes from the least to the most.",
    }
    return [note for sign, note in signs.items() if sign in drawn]


def _seconds(value: float | None) -> str:
    return "–" if value is None else number(value)


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
