"""Commands on a run that there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import JsonOption, RunArgument, RunOrSweepArgument, app, leave
from hpc_rl.cli.text import explanation_text, status_text
from hpc_rl.errors import UserError


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show a run's state and progress, and first of all why it failed, where it has.

    Example: hpc-rl status sft-1
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs.status import find_run

    found, explanation = diagnosis.diagnosis_of(find_run(run))
    if not as_json and (reasons := explanation_text(explanation, brief=True)):
        print(reasons + "\n")
    print(found.as_json() if as_json else status_text(found))


@app.command()
def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    node: Annotated[int | None, typer.Option(help="All logs of one node (0, 1, ...).", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a run's log: rank 0 and what went wrong, or every rank of one node.

    Example: hpc-rl logs -f sft-1
    """
    from hpc_rl.runs import control
    from hpc_rl.runs.follow import LogFiles, RunView, log_files
    from hpc_rl.runs.status import find_run, status_of

    found = find_run(run)

    def print_line(path: Path, line: str) -> None:
        if as_json:
            print(json.dumps({"file": str(path), "line": line}), flush=True)
        else:
            print(line if node is None else f"{path.stem}: {line}", flush=True)

    files = log_files(found, node)
    if not files and not (follow and status_of(found).active):
        what = "log yet" if node is None else f"log of a node {node}"
        raise UserError(f"run {found.name} has no {what} in {found.path}")
    if follow and node is None and not as_json:
        with RunView(found) as view:
            leave(control.wait(found, view.poll))
    with LogFiles(lambda: log_files(found, node), print_line) as log:
        log.poll()
        if follow:
            leave(control.wait(found, log.poll))


@app.command()
def cancel(run: RunOrSweepArgument) -> None:
    """End a run's job now, or all of a sweep. What they saved stays.

    Example: hpc-rl cancel sft-1
    """
    from hpc_rl.runs import control, sweeps
    from hpc_rl.runs.status import find_run
    from hpc_rl.runs.sweeps import find_sweep

    sweep = find_sweep(run)
    print(sweeps.cancel(sweep) if sweep else control.cancel(find_run(run)))


@app.command()
def stop(run: RunOrSweepArgument) -> None:
    """Ask a run, or all of a sweep, to save at its next step, and leave.

    Example: hpc-rl stop sft-1
    """
    from hpc_rl.runs import control, sweeps
    from hpc_rl.runs.status import find_run
    from hpc_rl.runs.sweeps import find_sweep

    sweep = find_sweep(run)
    print(sweeps.stop(sweep) if sweep else control.stop(find_run(run)))
