"""`clean`: how much disk space runs take up, and removal of what nobody needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rl.cli.app import app, note
from hpc_rl.cli.completion import run_names
from hpc_rl.cli.text import aligned, short_path, size_text
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from hpc_rl.runs.cleaning import Usage


@app.command()
def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs; all below ./runs if none is named.", autocompletion=run_names),
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Remove old checkpoints; the newest of each run stay.")
    ] = False,
    keep: Annotated[int, typer.Option(min=0, help="Checkpoints of each run that stay.")] = 1,
    whole: Annotated[bool, typer.Option("--whole", help="Remove whole run directories.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, metavar="DAYS", help="Only runs unchanged for so many days.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, list what would be removed.")] = False,
) -> None:
    """List runs with their sizes, or remove old checkpoints and runs. Queued and running ones are never touched.

    Example: hpc-rl clean --checkpoints --older-than 30
    """
    from hpc_rl.run_dir import RunDir
    from hpc_rl.runs import cleaning
    from hpc_rl.runs.status import ROOT, below_root, find_run, is_run, statuses_of

    if checkpoints and whole:
        raise UserError("--checkpoints and --whole: give one of them")
    if whole and not names and older_than is None:
        raise UserError("--whole without a name would remove every run: name runs, or give --older-than DAYS")
    runs = [find_run(name) for name in names or []] or [
        RunDir(path.absolute()) for path in below_root() if is_run(path)
    ]
    found = [cleaning.usage_of(run, now) for run, now in zip(runs, statuses_of(runs), strict=True)]
    if older_than is not None:
        found = cleaning.older_than(found, older_than)
    if not found:
        note(
            f"no runs in {ROOT.absolute()}" + (f" unchanged for {older_than:g} days" if older_than is not None else "")
        )
        return
    if not checkpoints and not whole:
        print(_table(found))
        return
    removals = cleaning.whole_runs(found) if whole else cleaning.old_checkpoints(found, keep)
    if not removals:
        note("nothing to remove")
        return
    for removal in removals:
        print(f"{size_text(removal.size):>9}  {short_path(removal.path)}")
    if yes:
        print(f"removed {size_text(cleaning.remove(removals))}")
    else:
        note(f"this would free {size_text(sum(one.size for one in removals))}; add --yes to remove it")


def _table(found: Sequence[Usage]) -> str:
    rows = [["run", "state", "checkpoints", "model", "total", "unchanged for"]]
    for one in sorted(found, key=lambda one: -one.total):
        sizes = [size_text(one.checkpoints), size_text(one.model), size_text(one.total)]
        rows.append([one.run.name, one.state, *sizes, f"{one.age_s / 86_400:.0f} days"])
    return aligned(rows, right={2, 3, 4, 5})
