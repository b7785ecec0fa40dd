"""A run that fails is reported before its tracker ends, because wandb may take minutes to end."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from hpc_rl.rl import main_ppo
from hpc_rl.rl.actors import process
from hpc_rl.rl.generation import run as generation
from hpc_rl.rl.loop import setup, trainer
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.page import report
from hpc_rl.tracking.tracker import Tracker
from tests.rl.ppo_config import ppo_config

REPORTED_FIRST = ["report", "finish 1"]


def fails(*_: Any) -> NoReturn:
    raise ZeroDivisionError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.metrics.touch()
    return run


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(report, "report_end", lambda *_: found.append("report"))
    monkeypatch.setattr(Tracker, "finish", lambda _self, code: found.append(f"finish {code}"))
    return found


def test_ppo(run: RunDir, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = ppo_config()
    parts = dict.fromkeys(("batches", "scoring", "carrier", "rollout"), SimpleNamespace(close=lambda: None))
    state = SimpleNamespace(tracker=Tracker(config, run, None, is_main=True), saver=nullcontext(), **parts)
    monkeypatch.setattr(setup, "set_up", lambda *_: state)
    monkeypatch.setattr(trainer, "train", fails)
    monkeypatch.setattr(process, "begin", lambda _: None)
    monkeypatch.setattr(main_ppo, "keep_freed_memory", lambda: None)
    with pytest.raises(ZeroDivisionError):
        main_ppo.TaskRunner().run(config, run, run.path)
    assert events == REPORTED_FIRST


def test_generate(run: RunDir, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = SimpleNamespace(parts=SimpleNamespace(is_joined=False))
    monkeypatch.setattr(generation, "prepare", lambda *_: prepared)
    monkeypatch.setattr(generation, "start_workers", lambda *_: SimpleNamespace(fleet=None))
    monkeypatch.setattr(generation, "open_queue", lambda *_: None)
    monkeypatch.setattr(generation, "open_generation", lambda *_: SimpleNamespace())
    monkeypatch.setattr(generation, "generate", fails)
    config: Any = ppo_config()
    with pytest.raises(ZeroDivisionError):
        generation.run_generation(config, run, run.path)
    assert events == REPORTED_FIRST
