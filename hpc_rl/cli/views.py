"""Commands that show runs: live on the terminal, and as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import RunArgument, app, leave
from hpc_rl.cli.text import explanation_text, short_path
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir


@app.command()
def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the present state once and exit.")] = False,
) -> None:
    """Watch a run on the terminal: progress, curves, nodes and log.

    Press q to leave; the run continues. If the run ends first, the exit code is that of the run.

    Example: hpc-rl watch sft-1
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs import live
    from hpc_rl.runs.status import find_run

    def explain(failed: RunDir) -> list[str]:
        _, explanation = diagnosis.diagnosis_of(failed)
        return explanation_text(explanation, brief=True).splitlines()

    found = find_run(run)
    if once:
        live.print_once(found, explain)
        return
    leave(live.watch(found, explain))


@app.command()
def report(
    targets: Annotated[
        list[str], typer.Argument(metavar="RUN_OR_SWEEP", help="Run directories, names of runs or sweeps, or job ids.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Default: report.html in the directory of the run or sweep; for several, in the "
            "current directory.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Rewrite the page every 30 s until all runs have ended.")
    ] = False,
) -> None:
    """Write an HTML page about one run, or one that compares several runs or the runs of a sweep.

    The page is a single file and needs no network.

    Example: hpc-rl report sft-1 sft-2 --out comparison.html
    """
    from hpc_rl.runs import reporting

    selected = reporting.select(targets)
    out = (out or reporting.default_path(targets, selected)).absolute()
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out} is {'a folder' if out.is_dir() else 'in a folder that does not exist'}")
    print(short_path(out), flush=True)
    if follow:
        reporting.follow_report(selected, out)
    else:
        reporting.write_report(selected, out)
