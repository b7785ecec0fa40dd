"""The table of docs/plan.md is what the plan finds."""

from __future__ import annotations

import os
from pathlib import Path

from tests.plan.gpu_table import table

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_the_table_is_up_to_date() -> None:
    """UPDATE_GOLDEN=1 writes it."""
    text = PAGE.read_text()
    lines = "\n".join(table()) + "\n"
    start = text.index("| model | SFT |")
    end = text.index("\n\n", start) + 1
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text[:start] + lines + text[end:])
    assert text[start:end] == lines
