"""The table as it is in docs/models.md, between two markers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hpc_rl.system.files import write_atomically
from tests.models_table.cells import Cell, Table, read_versions
from tests.models_table.checks import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table of families: python -m tests.models_table -->\n", "<!-- end of the table -->\n"


def rendered(table: Table) -> str:
    """Return the table with the notes of its cells below it, each once."""
    counted = Counter(cell.note for cells in table.values() for cell in cells.values() if cell.note)
    numbers = {note: number for number, note in enumerate(counted, start=1)}
    head = ["family", *(column.title for column in COLUMNS.values())]
    rows = [head, ["---"] * len(head)]
    for kind, cells in table.items():
        rows.append([f"`{kind}`", *(_shown(cells.get(name, Cell("not tried")), numbers) for name in COLUMNS)])
    versions = ", ".join(f"{name} {found}" for name, found in read_versions().items())
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    notes = [f"{number}. {note}" for note, number in numbers.items()]
    return "\n".join([*lines, "", f"Made with {versions}.", "", *notes, ""])


def _shown(cell: Cell, numbers: dict[str, int]) -> str:
    return cell.verdict + (f" ({numbers[cell.note]})" if cell.note else "")


def table_of_page() -> str:
    """Return what is between the markers."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write_page(table: Table) -> None:
    """Replace what is between the markers."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    write_atomically(PAGE, before + BEGIN + rendered(table) + END + rest.partition(END)[2])
