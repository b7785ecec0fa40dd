from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from hpc_rl.liveness import activity
from hpc_rl.liveness.activity import Activity
from hpc_rl.runs.follow import ProgressView

RECORD = {"step": 7, "total_steps": 20, "time": 1e9, "train/loss": 1.25, "perf/tokens_per_s": 5e4, "perf/eta_s": 61}


def test_progress_on_a_terminal_shows_the_numbers() -> None:
    stream = io.StringIO()
    with ProgressView(Console(file=stream, force_terminal=True, width=100)) as view:
        view.update(RECORD)
    assert "7/20" in stream.getvalue() and "loss 1.2500 · 50k tok/s · ETA 1:01" in stream.getvalue()


def test_nothing_else_is_written_below_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(activity, "_activity", running := Activity(print, 0.0))
        with ProgressView(Console(file=io.StringIO(), force_terminal=is_terminal)):
            assert activity._activity is (None if is_terminal else running)


def test_a_terminal_shows_what_a_run_does_before_its_first_step() -> None:
    stream = io.StringIO()
    with ProgressView(Console(file=stream, force_terminal=True, width=100)) as view:
        view.wait("waiting in the queue, 0:42")
    assert "waiting in the queue, 0:42" in stream.getvalue()


def test_progress_elsewhere_prints_nothing() -> None:
    stream = io.StringIO()
    with ProgressView(Console(file=stream, force_terminal=False)) as view:
        view.update(RECORD)
    assert stream.getvalue() == ""


def test_what_a_login_node_imports_is_light() -> None:
    code = (
        "import sys, hpc_rl.data.reading.rows, hpc_rl.runs.follow, hpc_rl.tracking.page.report\n"
        "assert not {'torch', 'transformers', 'numpy', 'pyarrow', 'wandb', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
