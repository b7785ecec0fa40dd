"""A run that stops before its data is tokenized ends with the exit code of a stop, and without a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.rl import main_ppo
from hpc_rl.rl.actors import process
from hpc_rl.rl.generation import run as generation
from hpc_rl.rl.loop import setup
from hpc_rl.run_dir import RunDir
from hpc_rl.training.stopping import Stopped
from tests.rl.ppo_config import ppo_config

TEXT = "stopped before the data was tokenized"


def stops(*_: Any) -> NoReturn:
    raise Stopped(TEXT)


def test_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(setup, "set_up", stops)
    monkeypatch.setattr(process, "begin", lambda _: None)
    monkeypatch.setattr(main_ppo, "keep_freed_memory", lambda: None)
    assert main_ppo.TaskRunner().run(ppo_config(), RunDir(tmp_path), tmp_path) == EXIT_STOPPED
    assert capsys.readouterr().out == f"{TEXT}\n"


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generation, "prepare", stops)
    config: Any = ppo_config()
    assert generation.run_generation(config, RunDir(tmp_path), tmp_path) == EXIT_STOPPED
    assert capsys.readouterr().out == f"{TEXT}\n"
