"""The commands: parse, call, print. Heavy imports only inside a command, so that --help answers at once."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpc_rl.errors import EXIT_BAD_INPUT, UserError

if TYPE_CHECKING:
    from hpc_rl.launch.render import Job
    from hpc_rl.launch.request import Request
    from hpc_rl.launch.runs import RunStatus

app = typer.Typer(
    name="hpc-rl",
    help="Post-training of language models on a Slurm cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Kind(StrEnum):
    sft = "sft"
    ppo = "ppo"
    torchrun = "torchrun"
    ray = "ray"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


KindArgument = Annotated[
    Kind,
    typer.Argument(
        help="sft: supervised fine-tuning; ppo: reinforcement learning; torchrun, ray: your own program of that kind."
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Options; torchrun, ray: then -- PROGRAM ARGUMENTS.", show_default=False),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, name of a run, or job id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
RunDirOption = Annotated[
    Path | None, typer.Option(help="Run directory; runs/NAME where not given.", show_default=False)
]


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
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY[=VALUE]", help="Any other sbatch option; repeatable.")
    ] = None
    after: Annotated[str | None, typer.Option(metavar="JOBID", help="Start after this job or run has ended well.")] = (
        None
    )

    def settings(self) -> dict[str, Any]:
        """Dotted configuration key -> value, for the flags that were given."""
        keys = {"nodes": "trainer.nnodes", "gpus_per_node": "trainer.n_gpus_per_node"}
        plain = ["cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint", "job_name"]
        keys |= {name: f"slurm.{name}" for name in plain}
        found = {key: getattr(self, name) for name, key in keys.items() if getattr(self, name) is not None}
        for option in self.sbatch or []:
            key, equals, value = option.removeprefix("--").partition("=")
            found[f"slurm.sbatch.{key}"] = value if equals else None
        return found


def with_slurm_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of SlurmFlags; it receives them as one argument, `flags`."""
    names = inspect.get_annotations(SlurmFlags, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in names.items()
    ]
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        flags = SlurmFlags(**{name: arguments.pop(name) for name in names})
        command(flags=flags, **arguments)

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
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, without Slurm.")] = False,
) -> None:
    """Submit a job: check it, write its run directory, queue it.

    A run that was stopped or cancelled goes on from its last checkpoint when it is submitted again by its name.
    """
    from hpc_rl.launch import jobs
    from hpc_rl.launch.render import render as render_script
    from hpc_rl.launch.request import job_of_script

    if script is not None and (arguments or flags != SlurmFlags() or run_dir or local):
        raise UserError("--script takes no other options: what the job does is written in the script")
    if dry_run and script is not None:
        print(job_of_script(kind.value, script)[1], end="")
        return
    if dry_run:
        print(render_script(_checked(_request(kind, arguments, flags, run_dir))), end="")
        return
    if not local:
        jobs.require_slurm()
    if script is not None:
        job, text = job_of_script(kind.value, script)
        jobs.check_free(job.run_dir)
    else:
        job, text = _reserved(_request(kind, arguments, flags, run_dir))
    if local:
        _leave(_run_local(job, text))
    job_id = jobs.submit(job, text)
    print(f"submitted job {job_id}: run {job.run_dir.name} in {_short(job.run_dir.path)}")
    if wait or follow:
        _leave(_wait(job, job_id, follow))
    print(f"  hpc-rl status {job.run_dir.name}\n  hpc-rl logs -f {job.run_dir.name}")


@app.command()
@with_slurm_flags
def render(
    kind: KindArgument, arguments: OverridesArgument = None, *, flags: SlurmFlags, run_dir: RunDirOption = None
) -> None:
    """Print the job script, and make the run directory that it needs: for editing, and plain `sbatch`."""
    from hpc_rl.launch import jobs

    job, text = _reserved(_request(kind, arguments, flags, run_dir))
    jobs.prepare(job, text, None)
    print(text, end="")
    _note(f"made {_short(job.run_dir.path)}; submit by `sbatch FILE` or `hpc-rl submit {kind.value} --script FILE`")


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show a run's state and progress."""
    from hpc_rl.launch import runs

    found = runs.status(runs.find_run(run))
    print(found.as_json() if as_json else _status_text(found))


@app.command()
def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    node: Annotated[int | None, typer.Option(help="All logs of one node (0, 1, ...).", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a run's log: rank 0 and what went wrong, or every rank of one node."""
    from hpc_rl.launch import jobs, runs, watch

    found = runs.find_run(run)

    def print_line(path: Path, line: str) -> None:
        if as_json:
            print(json.dumps({"file": str(path), "line": line}), flush=True)
        else:
            print(line if node is None else f"{path.stem}: {line}", flush=True)

    files = watch.log_files(found, node)
    if not files and not (follow and runs.status(found).active):
        what = "log yet" if node is None else f"log of a node {node}"
        raise UserError(f"run {found.name} has no {what} in {found.path}")
    if follow and node is None and not as_json:
        with watch.RunView(found) as view:
            _leave(jobs.wait(found, view.poll))
    with watch.LogFiles(lambda: watch.log_files(found, node), print_line) as log:
        log.poll()
        if follow:
            _leave(jobs.wait(found, log.poll))


@app.command()
def cancel(run: RunArgument) -> None:
    """End a run's job now. What it saved stays."""
    from hpc_rl.launch import jobs, runs

    print(jobs.cancel(runs.find_run(run)))


@app.command()
def stop(run: RunArgument) -> None:
    """Ask a run to save at its next step, and leave."""
    from hpc_rl.launch import jobs, runs

    print(jobs.stop(runs.find_run(run)))


def _print_keys(context: typer.Context, value: bool) -> None:
    """The --help of `config`: its own, and every documented key of the job kind."""
    if not value or context.resilient_parsing:
        return
    from rich.console import Console

    from hpc_rl.config.compose import documented_keys
    from hpc_rl.config.schema import SCHEMAS

    print(context.get_help())
    kinds = [word for word in sys.argv[1:] if word in SCHEMAS]
    console = Console(highlight=False)
    for kind in kinds:
        for key, type_name, default, meaning in documented_keys(SCHEMAS[kind]):
            console.print(f"[bold]{key}[/bold] = {default}  [dim]({type_name})[/dim]", soft_wrap=True, markup=True)
            console.print(f"    {meaning}", markup=False)
    raise typer.Exit()


@app.command(context_settings={"help_option_names": []})
def config(
    kind: KindArgument,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False)] = None,
    as_json: JsonOption = False,
    _help: Annotated[
        bool, typer.Option("-h", "--help", help="Also lists every key.", is_eager=True, callback=_print_keys)
    ] = False,
) -> None:
    """Print the resolved configuration; with --help, every key with type, default and meaning."""
    from hpc_rl.config.compose import compose_partly, dump

    found, missing = compose_partly(kind.value, overrides or [])
    print(found.model_dump_json(indent=2) if as_json else dump(found), end="\n" if as_json else "")
    if missing:
        _note(f"still to be given: {', '.join(missing)}")


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[Dtype | None, typer.Option(help="As trained where not given.", show_default=False)] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model folder."""
    from hpc_rl.launch import runs

    folder = Path(source) if Path(source, "trainer.json").is_file() else runs.find_run(source).path
    try:
        from hpc_rl.engine.export import export as export_model
    except ModuleNotFoundError as error:
        raise UserError(f"export needs {error.name}: pip install 'hpc-rl[train]'") from error
    from transformers.utils import logging

    logging.disable_progress_bar()
    export_model(folder, out, dtype)
    print(f"wrote {out}")


data_app = typer.Typer(help="Prepare data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command()
def gsm8k(
    source: Annotated[str, typer.Option(help="Raw GSM8K: a folder or file of jsonl, or a `datasets` name.")],
    out: Annotated[Path, typer.Option(help="Folder for train.jsonl and test.jsonl.")],
) -> None:
    """Grade-school mathematics (Cobbe et al. 2021) as chat messages."""
    from hpc_rl.data.gsm8k import prepare

    _print_counts(out, prepare(source, out))


@data_app.command()
def arithmetic(
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    train: Annotated[int, typer.Option(help="Training questions.")] = 4000,
    val: Annotated[int, typer.Option(help="Validation questions.")] = 200,
    seed: Annotated[int, typer.Option(help="Another seed, other questions.")] = 0,
    careless: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the training answers that forget to carry the one.")
    ] = 0.0,
) -> None:
    """Made-up sums as chat messages: small enough to learn on a laptop."""
    from hpc_rl.data.arithmetic import generate

    _print_counts(out, generate(out, train, val, seed, careless))


def main() -> NoReturn:
    """Run a command; a user's mistake is a line and exit code 2, without a traceback."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"hpc-rl: {line}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except BrokenPipeError:
        sys.exit(1)
    sys.exit(0)


def _request(kind: Kind, arguments: list[str] | None, flags: SlurmFlags, run_dir: Path | None) -> Request:
    from hpc_rl.launch.request import Request

    overrides, program = _split_program(kind, arguments or [])
    return Request(kind.value, overrides, program, flags.settings(), flags.after, run_dir)


def _checked(request: Request) -> Job:
    """The job, after every check; prints what could not be checked here."""
    from hpc_rl.launch import preflight

    job = request.job()
    for note in preflight.check(job):
        _note(note)
    return job


def _reserved(request: Request) -> tuple[Job, str]:
    """The job and its script, after every check, with a run directory of its own."""
    from hpc_rl.launch import jobs
    from hpc_rl.launch.render import render as render_script

    jobs.check_free(request.job().run_dir)
    render_script(_checked(request))  # a broken template shows before anything is made
    job = request.reserve()
    return job, render_script(job)


def _split_program(kind: Kind, arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Overrides and the user's own program: what follows `--`, which the parser of the command line has removed."""
    if kind not in (Kind.torchrun, Kind.ray) or "--" not in sys.argv:
        return arguments, ()
    count = len(sys.argv) - sys.argv.index("--") - 1
    return arguments[: len(arguments) - count], tuple(arguments[len(arguments) - count :])


def _run_local(job: Job, script: str) -> int:
    from hpc_rl.launch.local import run_local
    from hpc_rl.launch.watch import RunView

    print(f"run {job.run_dir.name} in {_short(job.run_dir.path)}", flush=True)
    with RunView(job.run_dir) as view:
        return run_local(job, script, view.poll)


def _wait(job: Job, job_id: str, follow: bool) -> int:
    from contextlib import nullcontext

    from hpc_rl.launch import jobs, runs
    from hpc_rl.launch.watch import RunView

    view = RunView(job.run_dir) if follow else None
    try:
        with view or nullcontext():
            code = jobs.wait(job.run_dir, view.poll if view else lambda: None)
    except KeyboardInterrupt:
        _note(f"job {job_id} goes on; hpc-rl stop {job.run_dir.name} or hpc-rl cancel {job.run_dir.name} ends it")
        return 130
    print(_status_text(runs.status(job.run_dir)))
    return code


def _status_text(found: RunStatus) -> str:
    rows: list[tuple[str, object]] = [
        ("run", f"{found.run}  ({_short(Path(found.run_dir))})"),
        ("job", found.job_id or "none"),
        ("state", found.state + (f" ({found.reason})" if found.reason else "")),
    ]
    if found.exit_code is not None:
        rows.append(("exit code", found.exit_code))
    if found.nodes:
        rows.append(("nodes", found.nodes))
    if found.attempt:
        rows.append(("attempt", found.attempt))
    if found.step is not None:
        rows.append(("step", f"{found.step} of {found.total_steps}"))
    shown = ("train/loss", "val/loss", "critic/score/mean", "val/score", "perf/tokens_per_s", "perf/eta_s")
    rows += [(key, f"{found.metrics[key]:.6g}") for key in shown if found.metrics.get(key) is not None]
    if found.log and Path(found.log).exists():
        rows.append(("log", _short(Path(found.log))))
    elif found.state == "FAILED" and not found.attempt:
        rows.append(("log", "none: the job could not write there. Is the run directory on a shared file system?"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _print_counts(out: Path, counts: dict[str, int]) -> None:
    for name, rows in counts.items():
        print(f"{out / name}.jsonl: {rows} rows")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _note(text: str) -> None:
    print(f"hpc-rl: {text}", file=sys.stderr)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
