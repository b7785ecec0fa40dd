from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import wandb

from hpc_rl.config.compose import compose
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking import wandb_run
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.tracking.samples import read_samples
from hpc_rl.tracking.timeline import new_timeline, read_timeline
from hpc_rl.tracking.tracker import Tracker


def tracker(folder: Path, wandb_id: str | None = None, is_main: bool = True, **changes: Any) -> Tracker:
    given = {"trainer.wandb_mode": "offline", **{f"trainer.{name}": value for name, value in changes.items()}}
    config: Any = compose("sft", ["model.path=m", "data.train_files=a"], given)
    return Tracker(config, RunDir(folder), wandb_id, is_main)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No way to any account: neither a key in the environment nor one in the home folder."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def silent_proxy() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that takes connections and never answers: the network at its worst."""
    asked: list[bytes] = []
    kept: list[socket.socket] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            kept.append(connection)
            asked.append(connection.recv(200))

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
    for open_socket in (server, *kept):
        open_socket.close()


def test_console_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tracker(tmp_path)
    made.log(1, {"train/loss": 2.0, "timing_s/step": 0.5}, total_steps=101)
    made.log(2, {"train/loss": 1.5}, total_steps=101)
    made.finish()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[0]["perf/eta_s"] == 50.0 and records[1]["perf/eta_s"] < 50
    assert capsys.readouterr().out.splitlines()[0] == "step   1/101 | loss 2.0000 | ETA 0:50"
    assert made.wandb_id is None


def test_the_console_shows_a_step_and_its_validation_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tracker(tmp_path)
    for step in (1, 2):
        made.log(step, {"train/loss": 2.0}, total_steps=2)
        made.log(step, {"val/loss": 3.0, "timing_s/step": 1.0} if step == 1 else {"timing_s/step": 1.0}, total_steps=2)
    made.finish()
    shown = [line.split(" | ETA")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["step 1/2 | loss 2.0000", "step 1/2 | val loss 3.0000", "step 2/2 | loss 2.0000"]
    first, last = read_metrics(tmp_path / "metrics.jsonl")
    assert {"train/loss", "val/loss", "timing_s/step"} <= first.keys() and {
        "train/loss",
        "timing_s/step",
    } <= last.keys()


def test_the_console_names_the_steps_that_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tracker(tmp_path)
    with pytest.raises(RuntimeError), made:  # at step 9
        for step in range(1, 9):
            made._last_line = float("-inf") if step == 5 else time.monotonic()
            made.log(step, {"train/loss": 2.0}, total_steps=99)
            if step == 7:
                made.log(step, {"val/loss": 3.0}, total_steps=99)
        raise RuntimeError
    made.finish()
    shown = [line.split(" | loss")[0].split(" | val")[0] for line in capsys.readouterr().out.splitlines()]
    left = "steps 1 to 4: see metrics.jsonl", "step 6: see metrics.jsonl", "step 8: see metrics.jsonl"
    assert shown == [left[0], "step  5/99", left[1], "step  7/99", left[2]]


def test_other_ranks_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tracker(tmp_path, logger=["console", "wandb"], is_main=False, wandb_id="kept")
    made.log(1, {"train/loss": 2.0}, total_steps=2)
    made.finish()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == "" and made.wandb_id == "kept"


def test_offline_wandb_keeps_its_id_and_says_how_to_sync(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_key: None
) -> None:
    made = tracker(tmp_path, logger=["wandb"], wandb_id="abc123")
    made.log(1, {"train/loss": float("nan")}, total_steps=2)
    made.finish()
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line == f"To upload the metrics: hpc-rl wandb sync {tmp_path}"
    assert made.wandb_id == "abc123" and list(tmp_path.glob("wandb/offline-run-*-abc123/*.wandb"))


def test_wandb_without_a_network_warns_and_goes_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_key: None,
    silent_proxy: tuple[str, list[bytes]],
) -> None:
    monkeypatch.setattr(wandb_run, "_INIT_TIMEOUT_S", 3)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    proxy, asked = silent_proxy
    started = time.monotonic()
    made = tracker(tmp_path, logger=["wandb"], wandb_mode="online", wandb_proxy=proxy)
    made.log(1, {"train/loss": 1.0}, total_steps=2)
    made.finish()
    assert time.monotonic() - started < 60
    printed = capsys.readouterr()
    assert printed.err.count("warning: wandb cannot be used online and writes to") == 1 and "wandb sync" in printed.out
    assert asked and asked[0].startswith(b"CONNECT")
    assert not any(proxy in value for value in os.environ.values())
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_an_error_closes_the_tracker_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), tracker(tmp_path, logger=["wandb"], wandb_mode="offline") as failing:
        failing.log(1, {"loss": 1.0}, 2)
        raise ZeroDivisionError
    assert capsys.readouterr().out.count("To upload the metrics: hpc-rl wandb sync") == 1
    with tracker(tmp_path, logger=["wandb"], wandb_mode="offline") as working:
        working.finish()
    assert capsys.readouterr().out.count("To upload the metrics") == 1


def test_answers_that_json_lacks_are_recorded_as_text(tmp_path: Path) -> None:
    made = tracker(tmp_path)
    made.log_samples(1, [{"prompt": "p", "response": "r", "answer": date(2025, 1, 2), "score": 1.0}], "train")
    (sample,) = read_samples(RunDir(tmp_path).samples)
    assert sample.answer == "2025-01-02"


@pytest.mark.parametrize("method", ["log", "log_table", "finish"])
def test_a_full_disk_ends_wandb_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_key: None, method: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = wandb_run.WandbRun(RunDir(tmp_path), {}, project="p", name="n", mode="offline", proxy=None, run_id="abc123")
    failing = {"log": (run._run, "log"), "log_table": (wandb, "Table"), "finish": (run._run, "finish")}
    with monkeypatch.context() as patch:
        patch.setattr(*failing[method], full)
        run.log(1, {"train/loss": 1.0})
        run.log_table(1, "val/generations", [{"prompt": "p"}])
        run.log_table(2, "val/generations", [{"prompt": "p"}])
        run.finish(0)
    run._run.finish()
    errors = capsys.readouterr().err
    assert errors.count("No space left on device") == errors.count("warning: wandb ") == 1


def test_the_timeline_is_that_of_the_latest_step(tmp_path: Path) -> None:
    made, other = tracker(tmp_path), tracker(tmp_path, is_main=False)
    for step in (1, 2):
        made.log_timeline(new_timeline(step, 2.0, {"gen": [(0.0, 1.0)]}))
    other.log_timeline(new_timeline(3, 2.0, {}))
    found = read_timeline(RunDir(tmp_path).timeline, 2)
    assert found is not None and found.step == 2
    RunDir(tmp_path).timeline.unlink()
    RunDir(tmp_path).timeline.mkdir()
    made.log_timeline(new_timeline(3, 2.0, {}))  # it cannot be written, and the run goes on
