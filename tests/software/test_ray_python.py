"""Ray starts workers with a Python whose path has a space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.software import ray_python


@pytest.fixture
def spaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in a folder with a space."""
    folder = tmp_path / "my project" / ".venv"
    folder.parent.mkdir()
    folder.symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(
        sys, "executable", str(folder / Path(sys.executable).relative_to(Path(sys.executable).parents[1]))
    )
    return folder


def test_a_path_without_spaces_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a/bin/python")
    assert ray_python.without_spaces(tmp_path / "new") == "/a/bin/python" and not (tmp_path / "new").exists()
    assert ray_python.quoted_python() == {}


def test_a_path_with_a_space(spaced: Path, tmp_path: Path) -> None:
    found = ray_python.without_spaces(tmp_path / "new")
    assert found == f"{tmp_path}/new/python/bin/{Path(sys.executable).name}"
    assert ray_python.quoted_python() == {"py_executable": f"'{sys.executable}'"}
    program = "import sys, pytest; print(sys.prefix)"
    done = subprocess.run(["bash", "-c", f"exec {found} -c '{program}'"], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{tmp_path}/new/python\n", done.stderr
