"""Commands that show a run: on the terminal while it runs, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import RunArgument, app, leave
from hpc_rl.cli.text import short_path
from hpc_rl.errors import UserError


@app.command()
def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print what there is to see now, and end.")] = False,
) -> None:
    """Watch a run on the terminal: progress, curves, nodes and log, until it ends or you press q.

    Leaving does not touch the run; when the run ends first, the exit code is its own.

    Example: hpc-rl watch sft-1
    """
    from hpc_rl.runs import live
    from hpc_rl.runs.status import find_run

    found = find_run(run)
    if once:
        live.print_once(found)
        return
    leave(live.watch(found))


@app.command()
def report(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Run directories, names of runs, or job ids.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write (default: report.html in the run directory; of several runs, in this folder).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML file on a run, or on several side by side; no network is needed to read it.

    Example: hpc-rl report sft-1 sft-2 --out comparison.html
    """
    from hpc_rl.runs.history import full_history
    from hpc_rl.runs.status import find_run
    from hpc_rl.tracking.recorded import read_run
    from hpc_rl.tracking.report import MOST_RUNS, write_page

    found = [find_run(name) for name in names]
    if len(found) > MOST_RUNS:
        raise UserError(f"{len(found)} runs were asked for, and a report compares {MOST_RUNS} at most")
    if out is None:
        out = found[0].report if len(found) == 1 else Path("report.html")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out} is {'a folder' if out.is_dir() else 'in a folder that does not exist'}")
    recorded = [read_run(run).with_history(full_history(run)) for run in found]
    print(short_path(write_page(recorded, out.absolute())))
