"""The command `lend`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import app, note
from hpc_rl.cli.submit import DryRunOption, SlurmFlags, with_slurm_flags
from hpc_rl.cli.text import submitted_text
from hpc_rl.errors import UserError


@app.command()
@with_slurm_flags
def lend(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run that trains: its name, directory or job id.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of the jobs, such as lend.wait_s=60.", show_default=False),
    ] = None,
    *,
    flags: SlurmFlags,
    role: Annotated[
        str,
        typer.Option(
            help="What the nodes do. engines: generate responses for a run of `submit ppo`. environments: run its "
            "environments and tools, on CPUs. eval: score checkpoints of a run of `submit sft`, `dpo`, `distill` or "
            "`ppo`."
        ),
    ] = "engines",
    count: Annotated[int, typer.Option(min=1, help="Number of jobs, each with --nodes nodes.")] = 1,
    min_time: Annotated[
        str | None,
        typer.Option(help="Shortest useful walltime. Slurm may reduce --time to it, to start a job earlier."),
    ] = None,
    auto: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Queue nothing now: the run itself queues up to N of these jobs while it waits for its engines. 0: "
            "end this, and cancel those in the queue.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Queue jobs that lend their nodes to a run while it trains. They may come and leave at any time.

    A job ends when the run ends. If it is preempted, or its walltime ends, it is queued again.

    Example: hpc-rl lend math --nodes 4 --partition preempt --time 1:00:00

    Example: hpc-rl lend math --auto 16 --partition preempt --time 1:00:00
    """
    from hpc_rl.runs.finding import find_run
    from hpc_rl.submission import launch, queue
    from hpc_rl.submission.auto_lending.order import place_order
    from hpc_rl.submission.auto_lending.turn import end_order
    from hpc_rl.submission.lending import lend_job
    from hpc_rl.submission.script.render import render

    if flags.after is not None:
        raise UserError("--after: a job of `lend` waits for its run by itself; leave it out")
    if auto is not None and count > 1:
        raise UserError(
            f"--count {count} with --auto {auto}: --count is for jobs that are queued now; remove one of the two"
        )
    if role == "eval" and count > 1:
        raise UserError(f"--count {count}: each job would score all checkpoints; give one job more nodes with --nodes")
    target, settings = find_run(run), flags.settings()
    if auto == 0:
        print(end_order(target))
        return
    if min_time is not None:
        settings["slurm.sbatch.time-min"] = min_time
    if not dry_run:
        queue.require_slurm()
    for number in range(count):
        job = lend_job(target, arguments or [], settings, flags.site, role, by_run=auto is not None)
        script = render(job)
        if arguments and number == 0 and job.working_dir != Path.cwd():
            note(f"relative paths are those below {job.working_dir}, where run {target.name} was submitted")
        for line in launch.notes_on([job]) if number == 0 else ():
            note(line)
        if dry_run:
            print(script, end="")
            return
        if auto is not None:
            print(place_order(target, job, auto))
            return
        job, script = launch.make_run_dir(job, script)
        print(submitted_text(job, queue.submit(job, script)), flush=True)
