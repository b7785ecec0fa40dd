"""The commands `submit` and `render`: from the command line to a job."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_rl.cli.app import CommandWithProgram, KindArgument, SiteOption, app, interrupted, leave, note, path, program_of
from hpc_rl.cli.completion import options
from hpc_rl.cli.text import outcome_text, short_path, submitted_text
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from hpc_rl.submission.job import Job
    from hpc_rl.submission.request import JobRequest


AUTO = "auto"
"""Value of --nodes."""

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Options of the job. For torchrun and ray, -- PROGRAM ARGUMENTS follows.",
        show_default=False,
        autocompletion=options,
    ),
]
RunDirOption = Annotated[
    Path | None, typer.Option(parser=path, help="Run directory. The default is runs/NAME.", show_default=False)
]


LocalOption = Annotated[bool, typer.Option("--local", help="Run on this machine, without Slurm.")]
InAllocationOption = Annotated[
    bool, typer.Option("--in-allocation", help="Run immediately in the allocation around this shell (salloc).")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait for the job and return its exit code.")]
FollowOption = Annotated[bool, typer.Option("--follow", help="Like --wait, and also show log and progress.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Submit a job even if it does not fit into the memory of its GPUs.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the exact scripts without submitting them.")]


def _at_least_1(option: typer.CallbackParam, given: int | None) -> int | None:
    if given is not None and given < 1:
        hint = "; for a job without GPUs, set trainer.device=cpu" if option.name == "gpus_per_node" else ""
        raise UserError(f"{option.opts[0]} {given}: expected at least 1{hint}")
    return given


def _gpus(context: typer.Context, option: typer.CallbackParam, given: int | None) -> int | None:
    return given if given == 0 and context.info_name == "lend" else _at_least_1(option, given)


def _nodes(option: typer.CallbackParam, given: str | None) -> str | None:
    if given is None or given == AUTO:
        return given
    try:
        count = int(given)
    except ValueError:
        raise UserError(f"--nodes {given}: expected a number, or {AUTO}") from None
    return str(_at_least_1(option, count))


@dataclass(frozen=True)
class SlurmFlags:
    """The Slurm options of `submit` and `render`, each an alias of a configuration key."""

    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            callback=_nodes,
            help="Number of nodes (trainer.nnodes). auto, in submit and render: the fewest on which the job fits.",
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(callback=_gpus, help="GPUs per node; on CPUs, processes per node (trainer.n_gpus_per_node)."),
    ] = None
    cpus_per_task: Annotated[
        int | None, typer.Option(callback=_at_least_1, help="CPUs per node (slurm.cpus_per_task).")
    ] = None
    mem: Annotated[str | None, typer.Option(help="Memory per node (slurm.mem).")] = None
    time: Annotated[str | None, typer.Option(help="Walltime (slurm.time).")] = None
    partition: Annotated[str | None, typer.Option(help="Partition (slurm.partition).")] = None
    account: Annotated[str | None, typer.Option(help="Account (slurm.account).")] = None
    qos: Annotated[str | None, typer.Option(help="Quality of service (slurm.qos).")] = None
    constraint: Annotated[str | None, typer.Option(help="Required node features (slurm.constraint).")] = None
    job_name: Annotated[str | None, typer.Option(help="Name of the job and of the run directory.")] = None
    image: Annotated[
        str | None, typer.Option(help="Image to run in: a SIF file or an unpacked folder (container.image).")
    ] = None
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY[=VALUE]", help="Any other sbatch option. Repeatable.")
    ] = None
    after: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Start after this run, sweep, pipeline or job has completed successfully."),
    ] = None
    site: SiteOption = None

    @property
    def fewest_nodes(self) -> bool:
        """Whether the plan of the job chooses the number of nodes."""
        return self.nodes == AUTO

    def settings(self, may_choose_nodes: bool = False) -> dict[str, Any]:
        """Return dotted configuration key -> value for the flags that were given.

        Args:
            may_choose_nodes: whether the command accepts `--nodes auto`.

        Raises:
            UserError: it does not, and the user asks for it.
        """
        if self.fewest_nodes and not may_choose_nodes:
            raise UserError(f"--nodes {AUTO} is an option of submit and render: give a number of nodes here")
        keys = {"gpus_per_node": "trainer.n_gpus_per_node", "image": "container.image"}
        plain = ["cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint", "job_name"]
        keys |= {name: f"slurm.{name}" for name in plain}
        found = {key: getattr(self, name) for name, key in keys.items() if getattr(self, name) is not None}
        if self.nodes is not None and not self.fewest_nodes:
            found["trainer.nnodes"] = int(self.nodes)
        for option in self.sbatch or []:
            key, equals, value = option.removeprefix("--").partition("=")
            found[f"slurm.sbatch.{key}"] = value if equals and value != "null" else None
        return found


def with_slurm_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every option of SlurmFlags; it receives them as one argument, `flags`."""
    names = inspect.get_annotations(SlurmFlags, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in names.items()
    ]
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def wrapper(**arguments: Any) -> Any:
        flags = SlurmFlags(**{name: arguments.pop(name) for name in names})
        return command(flags=flags, **arguments)

    kept = [parameter for name, parameter in own.parameters.items() if name != "flags"]
    kept = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept]
    wrapper.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*kept, *added]}
    return wrapper


@app.command(cls=CommandWithProgram)
@with_slurm_flags
def submit(
    context: typer.Context,
    kind: KindArgument,
    arguments: OverridesArgument = None,
    *,
    flags: SlurmFlags,
    run_dir: RunDirOption = None,
    script: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Job script to submit. `hpc-rl render` writes it, and you may edit it.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Submit a short trial: two steps, 10 minutes, slurm.test_partition if set.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact script without submitting it.")] = False,
    force: ForceOption = False,
    wait: WaitOption = False,
    follow: FollowOption = False,
    local: LocalOption = False,
    in_allocation: InAllocationOption = False,
) -> None:
    """Check a job, write its run directory and queue it.

    To resume a run that was stopped or cancelled from its last checkpoint, submit it again with the same --job-name.

    Example: hpc-rl submit sft --nodes 2 --gpus-per-node 4 model=qwen2.5-0.5b data.train_files=train.jsonl
    """
    from hpc_rl.submission import launch, queue
    from hpc_rl.submission.preflight.folders import check_run_dir
    from hpc_rl.submission.request import job_of_script
    from hpc_rl.submission.script.directives import environment_notes

    here = local or in_allocation
    if script is not None and (arguments or flags != SlurmFlags() or run_dir or here or test or force):
        raise UserError("--script cannot be combined with other options: the script contains all options of the job")
    if script is not None:
        job, text = job_of_script(str(kind), script, tuple(sys.argv))
        if dry_run:
            print(text, end="")
            return
        queue.require_slurm()
        check_run_dir(job.run_dir.path)
        queue.check_free(job.run_dir, job.kind)
        for line in environment_notes(os.environ, text):
            note(line)
        return _submit(lambda: (job, queue.submit(job, text)), wait, follow)
    request = request_of(context, kind, arguments, flags, run_dir, local=local, may_choose_nodes=True)
    request = replace(request, force=force)
    request = launch.as_test(request) if test else request
    carry_out(request, dry_run=dry_run, wait=wait, follow=follow, in_allocation=in_allocation)


def carry_out(request: JobRequest, *, dry_run: bool, wait: bool, follow: bool, in_allocation: bool) -> None:
    """Do with a request what the options of `submit` ask for."""
    from hpc_rl.submission import launch

    if (request.local or in_allocation) and (request.after or (request.local and in_allocation)):
        raise UserError("--local and --in-allocation start immediately: use only one of them, without --after")
    if dry_run:
        job, text = launch.prepare(request, note)
        print(text, end="")
        _note_options(job)
        return
    if request.local or in_allocation:
        leave(_run_here(request, in_allocation))
    _submit(lambda: launch.submit(request, note), wait, follow)


@app.command(cls=CommandWithProgram)
@with_slurm_flags
def render(
    context: typer.Context,
    kind: KindArgument,
    arguments: OverridesArgument = None,
    *,
    flags: SlurmFlags,
    run_dir: RunDirOption = None,
) -> None:
    """Print the job script and create its run directory, so that the script can be edited and passed to `sbatch`.

    Example: hpc-rl render sft --job-name mine model=qwen2.5-0.5b data.train_files=train.jsonl
    """
    from hpc_rl.submission import launch, queue

    if flags.after is not None:
        raise UserError(
            "render does not accept --after, which is an option of the submission: use hpc-rl submit --after RUN, or "
            "sbatch --dependency=afterok:ID FILE"
        )
    request = request_of(context, kind, arguments, flags, run_dir, may_choose_nodes=True)
    request = replace(request, force=True)  # nothing is queued: a job that does not fit is noted
    job, text = launch.make_run_dir(*launch.prepare(request, note))
    queue.prepare(job, text)
    print(text, end="")
    file = shlex.quote(short_path(job.run_dir.script))
    note(f"created {file}; after edits, submit it with sbatch {file}, or hpc-rl submit {kind} --script {file}")


def request_of(
    context: typer.Context,
    kind: str,
    arguments: list[str] | None,
    flags: SlurmFlags,
    run_dir: Path | None,
    *,
    local: bool = False,
    may_choose_nodes: bool = False,
) -> JobRequest:
    """Return the request that a parsed command line stands for.

    Args:
        may_choose_nodes: whether the command accepts `--nodes auto`.
    """
    from hpc_rl.submission.request import JobRequest

    return JobRequest(
        kind=str(kind),
        overrides=tuple(arguments or ()),
        program=program_of(context),
        settings=flags.settings(may_choose_nodes),
        fewest_nodes=flags.fewest_nodes,
        after=flags.after,
        run_dir=run_dir,
        site=flags.site,
        local=local,
        command=tuple(sys.argv),
    )


def _submit(submit: Callable[[], tuple[Job, str]], wait: bool, follow: bool) -> None:
    """Queue a job, and wait for its end if that is wanted.

    Args:
        submit: queues it; returns it and its id.
    """
    # Before there is a job: Ctrl-C during an import can be lost, or end the program without the message.
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs import control, status
    from hpc_rl.runs.stages import Stages

    if follow:
        from hpc_rl.runs.follow import RunView

    job, job_id = submit()
    code = None
    try:
        print(submitted_text(job, job_id), flush=True)
        if expected := status.status_of(job.run_dir).expected_start:
            print(f"  expected start {expected.replace('T', ' ')}")
        if follow:
            with RunView(job.run_dir, note) as view:
                code = control.wait(job.run_dir, view.poll, view.saw)
        elif wait:
            stages = Stages(job.run_dir, note)
            code = control.wait(job.run_dir, stages.poll, stages.saw)
    except KeyboardInterrupt:
        leave(interrupted(job.run_dir))
    if code is not None:
        status_now, explanation = diagnosis.diagnosis_of(job.run_dir)
        print(outcome_text(job.run_dir, status_now, explanation, with_scores=code == 0 and not follow))
        leave(code)
    print(f"  hpc-rl status {job.run_dir.name}\n  hpc-rl logs -f {job.run_dir.name}")


def _note_options(job: Job) -> None:
    """Print the options that sbatch receives in addition to those in the script."""
    if job.after and job.after.sbatch_options:
        note(f"would be submitted with sbatch {' '.join(job.after.sbatch_options)} FILE")


def _run_here(request: JobRequest, in_allocation: bool) -> int:
    """Check a job and run it on this machine, or in the allocation around this shell; return its exit code."""
    from hpc_rl.submission import launch, queue
    from hpc_rl.submission.in_allocation import step_environment

    if in_allocation:
        queue.require_slurm()
        request = replace(request, settings={**request.settings, "slurm.requeue": False})  # needs sbatch
    job, script = launch.prepare(request, note)
    if in_allocation:
        step_environment(os.environ, job.config.trainer.nnodes)
    return run_here(*launch.make_run_dir(job, script), in_allocation)


def run_here(job: Job, script: str, in_allocation: bool = False) -> int:
    """Run a job on this machine, or in the allocation around this shell, and show its log; return its exit code."""
    from hpc_rl.runs.follow import RunView
    from hpc_rl.submission.in_allocation import run_in_allocation
    from hpc_rl.submission.local import run_local

    print(f"run {job.run_dir.name} in {short_path(job.run_dir.path)}", flush=True)
    with RunView(job.run_dir, note, "RUNNING") as view:
        return (run_in_allocation if in_allocation else run_local)(job, script, view.poll)
