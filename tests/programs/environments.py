"""Other people's programs as .ci/test-programs has installed them."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = REPOSITORY / "build" / "programs"


def folder_of(name: str) -> Path:
    """Return the folder of a program, or skip the test."""
    if not (PROGRAMS / name).exists():
        pytest.skip(f"{name} is not installed: .ci/test-programs .venv/bin/python {name}")
    return PROGRAMS / name


def python_of(name: str) -> str:
    """Return the Python of a program that has an environment."""
    return str(folder_of(name) / "bin" / "python")


def output_of(name: str, code: str, *arguments: str, **variables: str) -> str:
    """Return what a piece of Python prints in the environment of a program."""
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), **variables}
    done = subprocess.run(
        [python_of(name), "-c", code, *arguments], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
