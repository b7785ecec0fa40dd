"""The plan of a job against the model."""
from __future__ import annotations
from pathlib import Path


def compare_with_plan(path: Path) -> str:
    return ""
