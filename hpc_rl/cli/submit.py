"""`submit` and `render`: from words to a job."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_rl.cli.app import Kind, KindArgument, SiteOption, app, leave, note
from hpc_rl.cli.text import explanation_text, short_path, status_text, submitted_text
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from hpc_rl.submit.request import Request
    from hpc_rl.submit.script import Job


OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Options; torchrun, ray: then -- PROGRAM ARGUMENTS.", show_default=False),
]
RunDirOption = Annotated[
    Path | None, typer.Option(help="Run directory; runs/NAME where not given.", show_default=False)
]


LocalOption = Annotated[bool, typer.Option("--local", help="Run on this machine, without Slurm.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the exact scripts; submit nothing.")]


@dataclass(frozen=True)
class SlurmFlags:
    """The Slurm options of `submit` and `render`, each an alias of a configuration key."""

    nodes: Annotated[int | None, typer.Option(help="Nodes (trainer.nnodes).")] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs, or CPU processes, per node (trainer.n_gpus_per_node).")
    ] = None
    cpus_per_task: Annotated[int | None, typer.Option(help="CPUs per node (slurm.cpus_per_task).")] = None
    mem: Annotated[str | None, typer.Option(help="Memory per node (slurm.mem).")] = None
    time: Annotated[str | None, typer.Option(help="Walltime (slurm.time).")] = None
    partition: Annotated[str | None, typer.Option(help="Partition (slurm.partition).")] = None
    account: Annotated[str | None, typer.Option(help="Account (slurm.account).")] = None
    qos: Annotated[str | None, typer.Option(help="Quality of service (slurm.qos).")] = None
    constraint: Annotated[str | None, typer.Option(help="Node features (slurm.constraint).")] = None
    job_name: Annotated[str | None, typer.Option(help="Job name, and the run directory's name.")] = None
    image: Annotated[
        str | None, typer.Option(help="Run inside this image: a SIF file or an unpacked folder (container.image).")
    ] = None
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY[=VALUE]", help="Any other sbatch option; repeatable.")
    ] = None
    after: Annotated[
        str | None, typer.Option(metavar="RUN", help="Start after this run, sweep or job has ended well.")
    ] = None
    site: SiteOption = None

    def settings(self) -> dict[str, Any]:
        """Dotted configuration key -> value, for the flags that were given."""
        keys = {"nodes": "trainer.nnodes", "gpus_per_node": "trainer.n_gpus_per_node", "image": "container.image"}
        plain = ["cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint", "job_name"]
        keys |= {name: f"slurm.{name}" for name in plain}
        found = {key: getattr(self, name) for name, key in keys.items() if getattr(self, name) is not None}
        for option in self.sbatch or []:
            key, equals, value = option.removeprefix("--").partition("=")
            found[f"slurm.sbatch.{key}"] = value if equals else None
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


@app.command()
@with_slurm_flags
def submit(
    kind: KindArgument,
    arguments: OverridesArgument = None,
    *,
    flags: SlurmFlags,
    run_dir: RunDirOption = None,
    script: Annotated[
        Path | None,
        typer.Option(help="Submit this script (from `render`, edited by hand) instead.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact script; submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Block; the exit code is the job's.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Like --wait, and show log and progress.")] = False,
    local: LocalOption = False,
    in_allocation: Annotated[
        bool, typer.Option("--in-allocation", help="Run now, inside the allocation around this shell (salloc).")
    ] = False,
) -> None:
    """Submit a job: check it, write its run directory, queue it.

    A run that was stopped or cancelled goes on from its last checkpoint when it is submitted again by its name.

    Example: hpc-rl submit sft --nodes 2 --gpus-per-node 4 model=qwen2.5-0.5b data.train_files=train.jsonl
    """
    from hpc_rl.submit import queue
    from hpc_rl.submit.local import check_local
    from hpc_rl.submit.request import job_of_script
    from hpc_rl.submit.script import render as render_script

    here = local or in_allocation
    if script is not None and (arguments or flags != SlurmFlags() or run_dir or here):
        raise UserError("--script takes no other options: what the job does is written in the script")
    if here and (flags.after or (local and in_allocation)):
        raise UserError("--local and --in-allocation run at once: give one of them, and no --after")
    if local:
        check_local(request_of(kind, arguments, flags, run_dir).job())
    if dry_run and script is not None:
        print(job_of_script(kind.value, script)[1], end="")
        return
    if dry_run:
        job = _checked(request_of(kind, arguments, flags, run_dir), here)
        print(render_script(job), end="")
        _note_options(job)
        return
    if not local:
        queue.require_slurm()
    if in_allocation:
        _check_allocation(request_of(kind, arguments, flags, run_dir))
    if script is not None:
        job, text = job_of_script(kind.value, script)
        queue.check_free(job.run_dir)
    else:
        job, text = _reserved(request_of(kind, arguments, flags, run_dir), here)
    if here:
        leave(run_here(job, text, in_allocation))
    job_id = queue.submit(job, text)
    print(submitted_text(job, job_id))
    if wait or follow:
        leave(_wait(job, job_id, follow))
    print(f"  hpc-rl status {job.run_dir.name}\n  hpc-rl logs -f {job.run_dir.name}")


@app.command()
@with_slurm_flags
def render(
    kind: KindArgument, arguments: OverridesArgument = None, *, flags: SlurmFlags, run_dir: RunDirOption = None
) -> None:
    """Print the job script, and make the run directory that it needs: for editing, and plain `sbatch`.

    Example: hpc-rl render sft --job-name mine model=qwen2.5-0.5b data.train_files=train.jsonl
    """
    from hpc_rl.submit import queue

    if flags.after is not None:
        raise UserError(
            "--after is said at submission: hpc-rl submit --after RUN, or sbatch --dependency=afterok:ID FILE"
        )
    job, text = _reserved(request_of(kind, arguments, flags, run_dir))
    queue.prepare(job, text, None)
    print(text, end="")
    note(f"made {short_path(job.run_dir.path)}; submit by `sbatch FILE` or `hpc-rl submit {kind.value} --script FILE`")


def request_of(kind: Kind, arguments: list[str] | None, flags: SlurmFlags, run_dir: Path | None) -> Request:
    from hpc_rl.submit.request import Request

    overrides, program = _split_program(kind, arguments or [])
    return Request(kind.value, overrides, program, flags.settings(), flags.after, run_dir, flags.site)


def _checked(request: Request, local: bool = False) -> Job:
    """The job, after every check; prints what could not be checked here."""
    from hpc_rl.submit import preflight

    job = request.job()
    for unchecked in preflight.check(job, local=local):
        note(unchecked)
    return job


def _reserved(request: Request, local: bool = False) -> tuple[Job, str]:
    """The job and its script, after every check, with a run directory of its own."""
    from hpc_rl.submit import queue
    from hpc_rl.submit.script import render as render_script

    queue.check_free(request.job().run_dir)
    render_script(_checked(request, local))  # a broken template shows before anything is made
    job = request.reserve()
    return job, render_script(job)


def _split_program(kind: Kind, arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Overrides and the user's own program: what follows `--`, which the parser of the command line has removed."""
    if kind not in (Kind.torchrun, Kind.ray) or "--" not in sys.argv:
        return arguments, ()
    count = len(sys.argv) - sys.argv.index("--") - 1
    return arguments[: len(arguments) - count], tuple(arguments[len(arguments) - count :])


def _check_allocation(request: Request) -> None:
    from hpc_rl.submit.in_allocation import step_environment

    step_environment(os.environ, request.config().trainer.nnodes)


def _note_options(job: Job) -> None:
    """On a dry run, what sbatch is told beside the script."""
    if job.after and job.after.sbatch_options:
        note(f"submitted by sbatch {' '.join(job.after.sbatch_options)} FILE")


def run_here(job: Job, script: str, in_allocation: bool = False) -> int:
    """Run a job on this machine, or in the allocation around it, and show its log; the exit code."""
    from hpc_rl.runs.follow import RunView
    from hpc_rl.submit.in_allocation import run_in_allocation
    from hpc_rl.submit.local import run_local

    print(f"run {job.run_dir.name} in {short_path(job.run_dir.path)}", flush=True)
    with RunView(job.run_dir) as view:
        return (run_in_allocation if in_allocation else run_local)(job, script, view.poll)


def _wait(job: Job, job_id: str, follow: bool) -> int:
    from contextlib import nullcontext

    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs import control
    from hpc_rl.runs.follow import RunView

    view = RunView(job.run_dir) if follow else None
    try:
        with view or nullcontext():
            code = control.wait(job.run_dir, view.poll if view else lambda: None)
    except KeyboardInterrupt:
        note(f"job {job_id} goes on; hpc-rl stop {job.run_dir.name} or hpc-rl cancel {job.run_dir.name} ends it")
        return 130
    found, explanation = diagnosis.diagnosis_of(job.run_dir)
    if reasons := explanation_text(explanation, brief=True):
        print(reasons + "\n")
    print(status_text(found))
    return code
