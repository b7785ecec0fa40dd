"""The commands `sweep`, and `chain` with stages or with a pipeline, which submit several runs at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rl.cli.app import (
    CommandWithProgram,
    KindArgument,
    app,
    leave,
    note,
)
from hpc_rl.cli.submit import (
    DryRunOption,
    LocalOption,
    OverridesArgument,
    RunDirOption,
    SlurmFlags,
    request_of,
    run_here,
    with_slurm_flags,
)
from hpc_rl.cli.text import short_path, submitted_text
from hpc_rl.config.groups import choices
from hpc_rl.config.kinds import KINDS
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from hpc_rl.submission.job import Job
    from hpc_rl.submission.request import JobRequest
    from hpc_rl.submission.series.pipeline import PlannedPipeline


@app.command(cls=CommandWithProgram)
@with_slurm_flags
def sweep(
    context: typer.Context,
    kind: KindArgument,
    arguments: OverridesArgument = None,
    *,
    flags: SlurmFlags,
    run_dir: RunDirOption = None,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of runs at a time.", show_default=False)
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Submit one run for every combination of values, as one Slurm array.

    Separate the values of a key by commas: optim.lr=1e-5,3e-5. The runs are named NAME_1, NAME_2 and so on.

    Example: hpc-rl sweep sft model.path=model data.train_files=train.jsonl optim.lr=1e-5,3e-5 --max-parallel 2
    """
    from hpc_rl.submission import queue
    from hpc_rl.submission.series import sweep as sweeps

    if not dry_run:
        queue.require_slurm()
    planned = sweeps.plan(request_of(context, kind, arguments, flags, run_dir), max_parallel)
    for unchecked in planned.notes:
        note(unchecked)
    if dry_run:
        print(f"==> sweep.sbatch <==\n{planned.script}")
        _print_scripts(planned.jobs, planned.scripts)
        return
    job_id = sweeps.submit(planned)
    name = planned.sweep.name
    print(f"submitted job {job_id}: {len(planned.points)} runs of sweep {name} in {short_path(planned.sweep.path)}")
    print(f"  hpc-rl runs {name}\n  hpc-rl logs -f {name}_1")


@app.command(context_settings={"allow_interspersed_args": False})
def chain(
    stages: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND [KEY=VALUE]... -- KIND [KEY=VALUE]... | PIPELINE [NAME=VALUE]...",
            help="Stages, each with the arguments of `submit`; or a pipeline: a file, or "
            f"{' or '.join(choices('pipeline'))}. `hpc-rl chain PIPELINE --help` lists its options.",
        ),
    ],
    dry_run: DryRunOption = False,
    local: LocalOption = False,
    show: Annotated[bool, typer.Option("--show", help="Print the path and the file of a pipeline.")] = False,
) -> None:
    """Submit stages that run one after the other. Each starts when the previous one completes, from the model that it
    exports.

    Options of the chain come first. Options of a stage, such as --nodes and --time, follow its kind. A pipeline is a
    file with stages, which may run for several rounds.

    Example: hpc-rl chain sft model.path=model data.train_files=train.jsonl -- ppo --nodes 2 recipe=gsm8k-2nodes
    """
    if show:
        from hpc_rl.config.pipeline import file_of_pipeline, load_pipeline

        load_pipeline(stages[0])
        path = file_of_pipeline(stages[0])
        note(str(path))
        print(path.read_text(encoding="utf-8"), end="")
        return
    if stages[0] not in KINDS:
        flags = [*(["--dry-run"] if dry_run else []), *(["--local"] if local else [])]
        _run_command("pipeline", "hpc-rl chain", [*flags, *stages])
        return
    from hpc_rl.submission import queue
    from hpc_rl.submission.series import chain as chains

    if {"--help", "-h"} & {*stages}:
        _run_command("submit", "hpc-rl submit", ["--help"])  # the options of a stage are those of submit
        return
    requests = [_stage(words, local) for words in _split_stages(stages)]
    if not dry_run and not local:
        queue.require_slurm()
    planned, notes = chains.plan(requests, local)
    for unchecked in notes:
        note(unchecked)
    if dry_run:
        _print_scripts([job for job, _ in planned], [script for _, script in planned])
        note("all but the first would be submitted with sbatch --dependency=afterok:ID --kill-on-invalid-dep=yes")
        return
    if local:
        for job, script in planned:
            if code := run_here(job, script):
                leave(code)
        return
    for job, job_id in chains.submit([job for job, _ in planned]):
        print(submitted_text(job, job_id))


@app.command(hidden=True)
@with_slurm_flags
def pipeline(
    name: Annotated[str, typer.Argument(metavar="PIPELINE", help="File, or name of a shipped pipeline.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE", help="Values of the pipeline, and STAGE.KEY=VALUE for an option of one stage."
        ),
    ] = None,
    *,
    flags: SlurmFlags,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds. The default is in the file.", show_default=False)
    ] = None,
    dry_run: DryRunOption = False,
    local: LocalOption = False,
) -> None:
    """Submit a pipeline: stages that run one after the other, for several rounds.

    Slurm options apply to all stages that do not set them. --job-name is the name of the pipeline.

    Example: hpc-rl chain rejection-sampling --rounds 3 model=model prompts=train.jsonl test=test.jsonl reward=gsm8k
    """
    from hpc_rl.submission import queue
    from hpc_rl.submission.series import pipeline as pipelines

    if not dry_run and not local:
        queue.require_slurm()
    settings = {key: value for key, value in flags.settings().items() if key != "slurm.job_name"}
    asked = pipelines.PipelineRequest(
        name, words or (), settings, rounds, flags.job_name, flags.after, flags.site, local, tuple(sys.argv)
    )
    planned = pipelines.plan(asked)
    for unchecked in planned.notes:
        note(unchecked)
    if dry_run:
        _print_scripts(planned.jobs, planned.scripts)
        return
    if local:
        leave(_run_here_in_order(planned))
    job_ids = pipelines.submit(planned)
    folder = planned.folder
    print(f"submitted jobs {job_ids[0]} to {job_ids[-1]}: pipeline {folder.name} in {short_path(folder.path)}")
    print(f"  {len(job_ids)} stages: {', '.join(job.run_dir.name for job in planned.jobs)}")
    print(f"  hpc-rl status {folder.name}\n  hpc-rl report {folder.name}")


def _run_here_in_order(planned: PlannedPipeline) -> int:
    """Run the unfinished stages of a pipeline on this machine; return the exit code of the first that fails, or 0."""
    from hpc_rl.runs.status import status_of
    from hpc_rl.submission import queue
    from hpc_rl.submission.series import pipeline as pipelines
    from hpc_rl.submission.series.after import COMPLETED

    queue.reserve(planned.folder.path)
    pipelines.prepare(planned)
    for job, script in zip(planned.jobs, planned.scripts, strict=True):
        if job.run_dir.path.is_dir() and status_of(job.run_dir).state == COMPLETED:
            continue
        if code := run_here(job, script):
            return code
    return 0


def _run_command(command: str, shown: str, words: list[str]) -> None:
    """Run another command of the application with these words.

    Args:
        shown: what its usage line shows.
    """
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    with found.make_context(shown, words) as context:
        found.invoke(context)


def _split_stages(words: list[str]) -> list[list[str]]:
    """Split the words into stages: `sft a=1 -- ppo b=2`, or `sft ppo` if the stages have no options."""
    if len(words) > 1 and all(word in KINDS for word in words):
        return [[word] for word in words]
    stages: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            stages.append([])
        else:
            stages[-1].append(word)
    if not all(stages):
        raise UserError("a stage is empty: write hpc-rl chain sft KEY=VALUE ... -- ppo KEY=VALUE ...")
    return stages


def _stage(words: list[str], local: bool) -> JobRequest:
    """Parse the words of one stage with the parser of `submit`."""
    submit = typer.main.get_command(app).commands["submit"]  # type: ignore[attr-defined]
    context = submit.make_context("hpc-rl chain", list(words))
    given = {name: value for name, value in context.params.items() if value not in (None, False, [])}
    flags = SlurmFlags(**{name: given.pop(name) for name in SlurmFlags.__dataclass_fields__ if name in given})
    kind, arguments, run_dir = (given.pop(name, None) for name in ("kind", "arguments", "run_dir"))
    if given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise UserError(f"{option} is not an option of a stage; write --dry-run and --local before the first stage")
    return request_of(context, str(kind), arguments, flags, run_dir, local=local)


def _print_scripts(jobs: Sequence[Job], scripts: Sequence[str]) -> None:
    """Print each script below a line with its name, in the format of head(1) and tail(1)."""
    for job, script in zip(jobs, scripts, strict=True):
        print(f"==> {job.run_dir.name}/{job.run_dir.script.name} <==\n{script}")
