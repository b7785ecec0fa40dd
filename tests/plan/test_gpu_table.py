"""The table of README.md and docs/plan.md is what the plan finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plan.gpu_table import table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lines() -> str:
    return "\n".join(table()) + "\n"


@pytest.mark.parametrize("page", ["README.md", "docs/plan.md"])
def test_the_table_is_up_to_date(page: str, lines: str) -> None:
    """UPDATE_GOLDEN=1 writes it."""
    path = ROOT / page
    text = path.read_text()
    start = text.index("| model | SFT |")
    end = text.index("\n\n", start) + 1
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text[:start] + lines + text[end:])
    assert text[start:end] == lines
