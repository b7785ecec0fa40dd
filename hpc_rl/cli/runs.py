"""Commands for existing runs: status, logs, runs, stop, cancel, requeue and attach."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import JsonOption, OptionalRunArgument, RunArgument, RunOrSweepArgument, app, leave, note, wait_for
from hpc_rl.cli.text import outcome_text, runs_table, short_path, size_text
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import ENV_RUN_DIR, RunDir


@app.command()
def status(run: OptionalRunArgument = None, as_json: JsonOption = False) -> None:
    """Show the state and progress of a run, or of all stages of a pipeline. If a run failed, the cause comes first.

    Without a name, the command uses the run in ./runs that was submitted last.

    Example: hpc-rl status sft-1
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs import run_sets, table
    from hpc_rl.runs.finding import find_run, newest_run

    run = run or newest_run()
    several = run_sets.find_run_set(run)
    if isinstance(several, run_sets.PipelineDir):
        rows = table.runs_of(several)
        print(json.dumps([row.as_dict() for row in rows]) if as_json else runs_table(rows))
        return
    one = find_run(run)
    for line in one.damaged():
        note(line)
    found, explanation = diagnosis.diagnosis_of(one)
    if as_json:
        print(found.as_json())
        return
    print(outcome_text(one, found, explanation))


@app.command()
def logs(
    run: OptionalRunArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until the job has ended.")] = False,
    node: Annotated[
        int | None, typer.Option(help="Print all logs of this node (0, 1, ...).", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the log of a run: the output of rank 0 and all errors, or every rank of one node.

    Example: hpc-rl logs -f sft-1
    """
    from hpc_rl.runs.finding import find_run, newest_run
    from hpc_rl.runs.follow import MOST_LOG_BYTES, LogFiles, RunView, log_files
    from hpc_rl.runs.stages import Stages
    from hpc_rl.runs.status import status_of

    found = find_run(run or newest_run())

    def print_line(path: Path, line: str) -> None:
        if as_json:
            print(json.dumps({"file": str(path), "line": line}), flush=True)
        else:
            print(line if node is None else f"{path.stem}: {line}", flush=True)

    files = log_files(found, node)
    now = None if files else status_of(found)
    if now is not None and not (follow and now.active):
        what = "log yet" if node is None else f"logs of node {node}"
        ended = f": its job has ended ({now.state}), and hpc-rl explain {found.name} shows why" if now.ended else ""
        raise UserError(f"run {found.name} has no {what} in {found.path}{ended}")
    for path in files:
        if path.exists() and path.stat().st_size > MOST_LOG_BYTES:
            note(f"only the last {MOST_LOG_BYTES // 2**20} MiB of {path} are shown")
    if follow and node is None and not as_json:
        with RunView(found, note) as view:
            leave(wait_for(found, view.poll, view.saw))
    with LogFiles(lambda: log_files(found, node), print_line) as log:
        if not follow:
            log.poll()
            return
        stages = Stages(found, (lambda _line: None) if as_json else note)

        def poll() -> None:
            log.poll()
            stages.poll()

        leave(wait_for(found, poll, stages.saw))


@app.command()
def cancel(run: RunOrSweepArgument) -> None:
    """End the job of a run, or all jobs of a sweep or pipeline, immediately. Checkpoints are kept.

    Example: hpc-rl cancel sft-1
    """
    from hpc_rl.runs import control, run_sets
    from hpc_rl.runs.finding import find_run

    several = run_sets.find_run_set(run)
    print(run_sets.cancel(several) if several else control.cancel(find_run(run)))


@app.command()
def stop(run: RunOrSweepArgument) -> None:
    """Ask a run, or all runs of a sweep or pipeline, to save as soon as it can and exit.

    Example: hpc-rl stop sft-1
    """
    from hpc_rl.runs import control, run_sets
    from hpc_rl.runs.finding import find_run

    several = run_sets.find_run_set(run)
    print(run_sets.stop(several) if several else control.stop(find_run(run)))


@app.command()
def runs(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR_OR_SWEEP",
            help="Directory of runs, or name of a sweep or pipeline. The default is ./runs.",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Sort by run, job, state, step, metric, hours, submitted, kind, a metric (val/loss) or an option "
            "(optim.lr). The default is the time of submission, newest last.",
            show_default=False,
        ),
    ] = None,
    reverse: Annotated[bool, typer.Option("-r", "--reverse", help="Reverse the order.")] = False,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="STATE_OR_KEY=VALUE",
            help="Show only runs in this state, or with this value of a column or an option. Repeat to combine.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="List all runs. The default leaves out old ones if more than 100 have ended."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read all checkpoints of these runs, or of one run, and compare their checksums."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List runs with state, step, last metric and node hours, or verify their checkpoints.

    Example: hpc-rl runs --filter FAILED --filter optim.lr=1e-5 --sort val/loss
    """
    from hpc_rl.runs import table

    if verify:
        if every or sort is not None or reverse or conditions:
            raise UserError(
                "--verify reads all checkpoints: it cannot be combined with --all, --sort, --reverse or --filter"
            )
        leave(_verify(target, as_json))
    recent = not (every or as_json or conditions or sort is not None)
    found, left_out = table.find_rows(target, recent)
    rows = table.filtered(found, conditions or ())
    if sort is not None:
        rows = table.ordered(rows, sort, reverse)
    elif reverse:
        rows = rows[::-1]
    if as_json:
        print(json.dumps([row.as_dict() for row in rows]))
    elif rows:
        print(runs_table(rows))
    elif found:
        note(f"none of the {len(found)} runs matches the filter")
    else:
        note(f"no runs in {Path(target or 'runs').absolute()}")
    for row in rows:
        for line in RunDir(Path(row.status.run_dir)).damaged():
            note(line)
    if left_out:
        note(f"{left_out:,} older runs have ended: --all lists them too")
    if any(row.status.is_last_recorded for row in rows):
        note("Slurm does not answer: the states of unfinished runs are the last ones that their jobs recorded")


def _verify(target: str | None, as_json: bool) -> int:
    """Verify checkpoints and print a line for each; return 1 if one is damaged."""
    from hpc_rl.runs import cleaning

    damaged = count = 0
    for found in cleaning.verify(cleaning.runs_named(target)):
        count += 1
        damaged += found.state == cleaning.DAMAGED
        if as_json:
            print(json.dumps(found.as_dict()), flush=True)
        else:
            reason = f": {found.problem}" if found.problem else ""
            print(f"{found.state:<9} {size_text(found.size):>9}  {short_path(found.path)}{reason}", flush=True)
    if not count:
        note("no checkpoints")
    elif damaged:
        note(
            f"damaged: {damaged} of {counted(count, 'checkpoint')}; runs skip damaged ones when they resume, and "
            "hpc-rl clean --checkpoints lists them"
        )
    return int(damaged > 0)


@app.command()
def requeue(run: RunOrSweepArgument) -> None:
    """Queue a run again, so that it resumes from its last checkpoint. A running job saves first.

    For a sweep or a pipeline, all runs that did not complete are queued again.

    Example: hpc-rl requeue sft-1
    """
    from hpc_rl.runs.finding import find_run
    from hpc_rl.runs.run_sets import find_run_set
    from hpc_rl.submission.requeue import requeue as queue_again

    print(queue_again(find_run_set(run) or find_run(run)))


@app.command(context_settings={"allow_interspersed_args": False})
def attach(
    run: RunArgument,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="Command to run. The default is your shell.", show_default=False),
    ] = None,
    node: Annotated[int, typer.Option(min=0, help="Node of the job (0, 1, ...).")] = 0,
) -> None:
    """Open a shell, or run a command, on a node of a running job, inside its allocation.

    Example: hpc-rl attach --node 1 sft-1 nvidia-smi
    """
    from hpc_rl.runs import control
    from hpc_rl.runs.finding import find_run
    from hpc_rl.runs.status import is_local, place_of, status_of
    from hpc_rl.slurm import commands
    from hpc_rl.slurm.allocation import expand_hostlist

    found = find_run(run)
    control.check_own(found)
    now = status_of(found)
    if now.state != "RUNNING" or now.job_id is None or is_local(now.job_id):
        what = "runs on this machine" if now.state == "RUNNING" else f"is {now.state}"
        raise UserError(f"run {found.name} {what}: attach requires a job that is running in Slurm")
    nodes = expand_hostlist(now.nodes)
    if node >= len(nodes):
        raise UserError(f"run {found.name} has no node {node}: its nodes are 0 to {len(nodes) - 1}")
    shell = [os.environ.get("SHELL", "/bin/bash")]
    place = place_of(found)
    argv = commands.attach_argv(now.job_id, place, nodes[node], command or shell, terminal=sys.stdin.isatty())
    # Variables of an allocation around this shell do not describe that job.
    os.execvpe(argv[0], argv, {**place.environment(os.environ), ENV_RUN_DIR: str(found.path)})
