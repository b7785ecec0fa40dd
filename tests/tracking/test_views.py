from __future__ import annotations

import io
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hpc_rl.tracking.plot import Series, line_plot, stacked_plot, thinned
from hpc_rl.tracking.progress import ProgressView

RECORD = {"step": 7, "total_steps": 20, "time": 1e9, "train/loss": 1.25, "perf/tokens_per_s": 5e4, "perf/eta_s": 61}


values = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), values), min_size=1, max_size=30))
def test_any_line_can_be_drawn(points: list[tuple[int, float]]) -> None:
    svg = line_plot([Series("a<b", sorted(points))])
    assert svg.startswith("<svg") and "nan" not in svg and "a<b" not in svg


def test_long_series_are_thinned() -> None:
    points = [(float(i), 1.0) for i in range(10_000)]
    assert stacked_plot([Series("a", points), Series("b", points)]).count(",") < 2000


def test_a_thinned_series_keeps_its_extremes() -> None:
    points = [(float(i), 1000.0 if i == 5000 else 0.0) for i in range(10_000)]
    buckets = thinned(points)
    assert len(buckets) <= 300 and max(bucket.high for bucket in buckets) == 1000.0
    svg = line_plot([Series("spike", points)])
    assert 'class="band s0"' in svg and ">1000</text>" in svg


def test_steps_are_whole_and_times_are_not() -> None:
    points = [(1.0, 1.0), (2.0, 3.0)]
    assert ">1.2</text>" not in line_plot([Series("a", points)])
    assert ">1.2</text>" in line_plot([Series("a", points)], x="hours")


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
