"""python -m tests.models_table: try all families, write cells.json beside this file and the table of docs/models.md.

python -m tests.models_table --families llama,qwen3 --columns vllm,plan    replaces these cells only
python -m tests.models_table --only-page                                   writes the page from the committed cells
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.models_table.cells import Cell, Table, read_cells, write_cells
from tests.models_table.page import write_page

if TYPE_CHECKING:
    from tests.models_table.checks import Tools

PROCESSES = 2


def main() -> None:
    """Run the checks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", type=lambda text: text.split(","), help="instead of all")
    parser.add_argument("--columns", type=lambda text: text.split(","), help="instead of all")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--only-page", action="store_true")
    given = parser.parse_args()
    if not given.only_page:
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        from tests.models_table.checks import COLUMNS
        from tests.small_models.families import FAMILIES

        table, started = read_cells(), time.monotonic()
        context = multiprocessing.get_context("fork")  # after the imports, which take long
        with ProcessPoolExecutor(given.processes, context) as pool:
            tried = [
                pool.submit(try_family, kind, given.columns, table.get(kind, {})) for kind in given.families or FAMILIES
            ]
            for future in as_completed(tried):
                kind, cells, seconds = future.result()
                table = read_cells()  # another process may have replaced others
                table[kind] = table.get(kind, {}) | cells
                shown = ", ".join(f"{name} {': '.join(filter(None, cell))}" for name, cell in cells.items())
                print(f"{time.monotonic() - started:.0f} s, {kind} {seconds:.0f} s: {shown}", flush=True)
                write_cells(in_order(table, FAMILIES, list(COLUMNS)))
    write_page(read_cells())


def in_order(table: Table, families: Iterable[str], columns: Sequence[str]) -> Table:
    """Return the cells in the order of families and columns."""
    return {
        kind: {name: table[kind][name] for name in columns if name in table[kind]} for kind in families if kind in table
    }


def try_family(
    kind: str, columns: Sequence[str] | None, known: Mapping[str, Cell]
) -> tuple[str, dict[str, Cell], float]:
    """Return the cells of a family and the seconds that they took. Called in a process that is kept for the next."""
    import torch

    from hpc_rl.rl.actors.process import quiet_libraries
    from tests.models_table.checks import COLUMNS, Row, cells_of

    torch.set_num_threads(1)
    quiet_libraries()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{kind}-") as folder, Path(os.devnull).open("w") as nothing:
        row = Row(kind, Path(folder), _tools())
        with contextlib.redirect_stdout(nothing):
            cells = cells_of(row, columns or list(COLUMNS), known)
    return kind, cells, time.monotonic() - started


@cache
def _tools() -> Tools:
    """Return what the families of this process share, until it ends."""
    from tests.models_table.checks import Tools

    tools = Tools()
    atexit.register(tools.close)
    return tools


if __name__ == "__main__":
    main()
