"""Commands for the results of runs: watch, report, export and clean."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rl.cli.app import OptionalRunArgument, app, continue_in_job_python, leave, note, path
from hpc_rl.cli.completion import run_names
from hpc_rl.cli.text import aligned, explanation_text, short_path, size_text
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import refuse_occupied

if TYPE_CHECKING:
    from hpc_rl.runs.cleaning import DiskUsage


@app.command()
def watch(
    run: OptionalRunArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state once and exit.")] = False,
) -> None:
    """Watch a run on the terminal: progress, curves, nodes and log.

    Press q to quit; the run continues. If the run ends first, its exit code is returned.

    Example: hpc-rl watch sft-1
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs import live
    from hpc_rl.runs.finding import find_run, newest_run

    def explain(failed: RunDir) -> list[str]:
        _, explanation = diagnosis.diagnosis_of(failed)
        return explanation_text(explanation, brief=True).splitlines()

    found = find_run(run or newest_run())
    if once:
        live.print_once(found, explain)
        return
    leave(live.watch(found, explain))


@app.command()
def metrics(
    run: OptionalRunArgument = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print all steps and metrics as comma-separated values, for other programs.")
    ] = False,
) -> None:
    """Print the metrics of a run, one row per step: the latest steps, or all of them as CSV.

    Example: hpc-rl metrics sft-1 --csv
    """
    from hpc_rl.runs.finding import find_run, newest_run
    from hpc_rl.tracking.formatting import learning_columns
    from hpc_rl.tracking.metrics import read_metrics, write_csv
    from hpc_rl.tracking.points import with_points

    found = find_run(run or newest_run())
    records = with_points(read_metrics(found.metrics), found.path)
    if not records:
        raise UserError(f"run {found.name} has no metrics yet: {found.metrics} has no step")
    if csv:
        write_csv(records, sys.stdout)
        return
    rows = learning_columns(records[-_LATEST_STEPS:])
    print(aligned(rows, right=set(range(len(rows[0])))))
    if len(records) > _LATEST_STEPS:
        note(f"the last {_LATEST_STEPS} of {len(records):,} steps; --csv prints all of them, with every metric")


_LATEST_STEPS = 20


@app.command()
def report(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_SWEEP", help="Run directories, names of runs, sweeps or pipelines, or job ids."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="File to write. The default is report.html, in the directory of the run, sweep or pipeline, or in the "
            "current directory for several runs.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Rewrite the page every 30 s until all runs have ended.")
    ] = False,
) -> None:
    """Write an HTML page about one run, or one that compares several runs, or those of a sweep or a pipeline.

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
    for line in reporting.damaged(selected):
        note(line)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run or a checkpoint folder.")],
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="New or empty folder for the model.")],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Data type of the weights. The default is trainer.export_dtype.", show_default=False),
    ] = None,
    merge: Annotated[
        bool | None,
        typer.Option(
            "--merge/--no-merge",
            help="Merge adapters (LoRA) into the weights of their model, or write a folder that peft loads. Default: "
            "model.lora.merge.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="DIR",
            help="Folder of the model that training started from, if it is no longer where it was.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model folder.

    Example: hpc-rl export sft-1 models/mine --dtype bfloat16
    """
    from hpc_rl.runs.finding import find_run

    folder = Path(source) if Path(source, "trainer.json").is_file() else find_run(source).path
    refuse_occupied(out)  # before imports that take many seconds
    continue_in_job_python("export", ("torch", "transformers", "safetensors"))
    from transformers.utils import logging

    from hpc_rl.training.checkpoints.export import export as export_model

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    export_model(folder, out, dtype, merge, base=None if base is None else str(base))
    print(f"wrote {out}")


@app.command()
def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs. The default is all below ./runs. With --tokenized: folders of tokenized data.",
            autocompletion=run_names,
        ),
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Remove old checkpoints, and keep the newest of each run.")
    ] = False,
    keep: Annotated[int, typer.Option(min=0, help="Number of checkpoints of each run to keep.")] = 1,
    whole: Annotated[bool, typer.Option("--whole", help="Remove whole run directories.")] = False,
    tokenized: Annotated[
        bool,
        typer.Option(
            "--tokenized", help="Remove tokenized data that no run uses. The default is ./runs/.tokenized-UID."
        ),
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="DAYS",
            help="Only runs that have not changed, or data that no run has begun to use, for this many days.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the folders. Without --yes they are only listed.")] = False,
) -> None:
    """List runs with their sizes, or remove old checkpoints, runs or tokenized data. Queued and running jobs are never
    affected.

    Example: hpc-rl clean --checkpoints --older-than 30
    """
    from hpc_rl.run_dir import TOKENIZED
    from hpc_rl.runs.folders import ROOT

    if checkpoints + whole + tokenized > 1:
        raise UserError("--checkpoints, --whole and --tokenized exclude each other: use only one of them")
    if tokenized:
        _clean_tokenized([Path(name) for name in names or []] or [ROOT / TOKENIZED], older_than or 0.0, yes)
        return
    if whole and not names and older_than is None:
        raise UserError("--whole without a name would remove every run: name runs, or give --older-than DAYS")
    _clean_runs(names or [], checkpoints, keep, whole, older_than, yes)


def _clean_runs(
    names: Sequence[str], checkpoints: bool, keep: int, whole: bool, older_than: float | None, yes: bool
) -> None:
    from hpc_rl.runs import cleaning
    from hpc_rl.runs.finding import find_run
    from hpc_rl.runs.folders import ROOT, is_run, runs_below
    from hpc_rl.runs.status import statuses_of

    runs = [find_run(name) for name in names] or [RunDir(path.absolute()) for path in runs_below(ROOT) if is_run(path)]
    found = [cleaning.usage_of(run, now) for run, now in zip(runs, statuses_of(runs), strict=True)]
    if older_than is not None:
        found = cleaning.older_than(found, older_than)
    removals = cleaning.leftovers(ROOT, runs) if checkpoints or whole else []
    if not found and not removals:
        note(
            f"no runs in {ROOT.absolute()}" + (f" unchanged for {older_than:g} days" if older_than is not None else "")
        )
        return
    if whole:
        removals += cleaning.whole_runs(found)
    elif checkpoints:
        removals += cleaning.old_checkpoints(found, keep, note if yes else None)
    else:
        print(_table(found))
        return
    if not removals:
        note("nothing to remove")
        return
    for removal in removals:
        print(f"{size_text(removal.size):>9}  {short_path(removal.path)}")
    if yes:
        print(f"removed {size_text(cleaning.remove(removals, note))}")
    else:
        note(f"this would free {size_text(sum(one.size for one in removals))}; add --yes to remove the folders")


def _clean_tokenized(folders: Sequence[Path], older_than: float, yes: bool) -> None:
    from hpc_rl.runs import cleaning

    found = [one for folder in folders for one in cleaning.tokenized_data(folder)]
    found = [one for one in found if one.age_s >= older_than * cleaning.DAY_S]
    if not found:
        note("nothing to remove")
        if yes:
            cleaning.remove_tokenized([], folders)
        return
    for one in found:
        print(f"{size_text(one.size):>9}  {short_path(one.path)}  {', '.join(one.files)}")
    total = sum(one.size for one in found)
    if not yes:
        note(f"this would free at most {size_text(total)}; data that a run uses stays. Add --yes to remove the folders")
        return
    used = cleaning.remove_tokenized(found, folders)
    print(f"removed {size_text(total - sum(one.size for one in used))}")
    if used:
        names = ", ".join(short_path(one.path) for one in used)
        note(
            f"not removed: {names}; a run uses this data, it belongs to another user, or the file system has no locks "
            "that show whether a run uses it: delete it when no run does"
        )


def _table(found: Sequence[DiskUsage]) -> str:
    rows = [["run", "state", "checkpoints", "model", "total", "unchanged for"]]
    for one in sorted(found, key=lambda one: -one.total):
        sizes = [size_text(one.checkpoints), size_text(one.model), size_text(one.total)]
        rows.append([one.run.name, one.state, *sizes, counted(round(one.age_s / 86_400), "day")])
    return aligned(rows, right={2, 3, 4, 5})
