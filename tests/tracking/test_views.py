from __future__ import annotations

import io
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.plot import Series, line_plot, stacked_plot
from hpc_rl.tracking.progress import ProgressView
from hpc_rl.tracking.report import write_report

RECORD = {"step": 7, "total_steps": 20, "time": 1e9, "train/loss": 1.25, "perf/tokens_per_s": 5e4, "perf/eta_s": 61}


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def run_dir(folder: Path, records: list[dict[str, object]]) -> RunDir:
    made = RunDir(folder / "run <b>&1")
    made.path.mkdir()
    made.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def test_report(tmp_path: Path) -> None:
    phases = {"timing_s/step": 2.0, "timing_s/data": 0.1, "timing_s/forward_backward": 1.5}
    made = run_dir(tmp_path, [{**RECORD, **phases, "step": step, "val/loss": 2.0 / step} for step in range(1, 21)])
    made.config.write_text("model:\n  path: <script>alert(1)</script>\n")
    page = write_report(made).read_text()
    tags = Tags(page)
    assert tags.tags.count("svg") == tags.tags.count("figure") == 4
    assert "script" not in tags.tags and "b" in tags.tags and tags.links == []
    assert "run &lt;b&gt;&amp;1" in page and "finished" in page and "2.000 → 0.100" in page and "other" in page
    assert sorted(p.name for p in made.path.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_report_of_a_run_on_its_way(tmp_path: Path) -> None:
    page = write_report(run_dir(tmp_path, [RECORD | {"train/loss": None}])).read_text()
    assert "at step 7 of 20" in page and "Training loss" not in page


def test_no_report_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics yet"):
        write_report(run_dir(tmp_path, []))


values = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), values), min_size=1, max_size=30))
def test_any_line_can_be_drawn(points: list[tuple[int, float]]) -> None:
    svg = line_plot([Series("a<b", sorted(points))])
    assert svg.startswith("<svg") and "nan" not in svg and "a<b" not in svg


def test_long_series_are_thinned() -> None:
    points = [(float(i), 1.0) for i in range(10_000)]
    assert stacked_plot([Series("a", points), Series("b", points)]).count(",") < 2000


def test_progress_on_a_terminal_shows_the_numbers() -> None:
    stream = io.StringIO()
    with ProgressView(Console(file=stream, force_terminal=True, width=100)) as view:
        view.update(RECORD)
    assert "7/20" in stream.getvalue() and "loss 1.2500 · 50k tok/s · ETA 1:01" in stream.getvalue()


def test_progress_elsewhere_prints_nothing() -> None:
    stream = io.StringIO()
    with ProgressView(Console(file=stream, force_terminal=False)) as view:
        view.update(RECORD)
    assert stream.getvalue() == ""


def test_what_a_login_node_imports_is_light() -> None:
    code = (
        "import sys, hpc_rl.data.rows, hpc_rl.tracking.progress, hpc_rl.tracking.report\n"
        "assert not {'torch', 'transformers', 'numpy', 'pyarrow', 'wandb', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
