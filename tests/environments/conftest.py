from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.software import user_code

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def first_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load files as a new process would: files of earlier tests have the same names."""
    monkeypatch.setattr(user_code, "_files", [])


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file with an environment; returns the name of a class or function in it."""

    def writer(source: str, name: str = "Own", file: str = "own.py") -> str:
        (tmp_path / file).write_text(source)
        return f"{tmp_path / file}:{name}"

    return writer
