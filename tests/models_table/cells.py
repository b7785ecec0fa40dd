"""The cells of the table and their file, which is committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

FILE = Path(__file__).with_name("cells.json")
Verdict = Literal["yes", "no", "not tried"]


class Cell(NamedTuple):
    """What was found for one family and one column."""

    verdict: Verdict
    note: str = ""
    """The reason of "no" and "not tried"; with "yes", what is different."""


Table = Mapping[str, Mapping[str, Cell]]
"""Family -> column -> cell."""


def read_cells() -> dict[str, dict[str, Cell]]:
    """Return the committed cells."""
    found = json.loads(FILE.read_text())
    return {kind: {name: Cell(*cell) for name, cell in cells.items()} for kind, cells in found.items()}


def write_cells(table: Table) -> None:
    """Write the cells, one family to a line group, so that changes can be read."""
    FILE.write_text(json.dumps({kind: dict(cells) for kind, cells in table.items()}, indent=1) + "\n")
