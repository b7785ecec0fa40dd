"""The application, and the arguments and options that several commands share."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hpc_rl import __version__
from hpc_rl.cli.completion import run_names, site_names
from hpc_rl.config.kinds import offered
from hpc_rl.errors import UserError
from hpc_rl.liveness.activity import begin_command
from hpc_rl.run_dir import RunDir

if TYPE_CHECKING:
    from hpc_rl.runs.status import RunStatus


def one_of(what: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a typer argument or option that takes one of some names.

    Args:
        what: the kind of thing that they name, for the message.
    """

    def check(context: typer.Context, given: str | None) -> str | None:
        if given is None or given in names or context.resilient_parsing:
            return given
        from hpc_rl.config.keys import nearest

        hint = (_meant(given) if what == "kind" else "") or nearest(given, names)
        raise UserError(f"there is no {what} {given!r}: choose one of {', '.join(names)}{hint}")

    return {"callback": check, "autocompletion": lambda incomplete: [n for n in names if n.startswith(incomplete)]}


def _meant(word: str) -> str:
    """Return what a word of other tools stands for, as the end of an error message; empty if it is unknown."""
    from hpc_rl.config.groups import choices

    name = word.lower().replace("-", "_")
    if name in choices("algorithm"):
        return f": write hpc-rl submit ppo algorithm={name}"
    if name in ("ipo", "kto", "simpo", "orpo"):
        return f": write hpc-rl submit dpo algorithm.loss={name}"
    if name in _KINDS:
        return f": write hpc-rl submit {name}"
    return f": write {_OTHER_WORDS[name]}" if name in _OTHER_WORDS else ""


_TRAIN = "hpc-rl submit KIND, with the kind sft, dpo, rm, distill or ppo"
_OTHER_WORDS = {
    **dict.fromkeys(("train", "run", "launch", "start", "fit"), _TRAIN),
    **dict.fromkeys(("finetune", "fine_tune", "finetuning", "lora", "qlora"), "hpc-rl submit sft"),
    **dict.fromkeys(("rl", "rlhf", "reinforce", "rloo", "remax"), "hpc-rl submit ppo, with algorithm=NAME"),
    **dict.fromkeys(("reward", "reward_model", "rw"), "hpc-rl submit rm"),
    **dict.fromkeys(("evaluate", "test", "benchmark"), "hpc-rl eval"),
    **dict.fromkeys(("inference", "infer", "sample", "rollout"), "hpc-rl submit generate"),
    **dict.fromkeys(("pipeline", "iterative_dpo"), "hpc-rl chain"),
    **dict.fromkeys(("ls", "list", "ps", "jobs"), "hpc-rl runs"),
    **dict.fromkeys(("kill", "abort", "delete"), "hpc-rl cancel, or hpc-rl clean for the files"),
    **dict.fromkeys(("resume", "restart", "retry"), "hpc-rl requeue"),
    **dict.fromkeys(("log", "tail"), "hpc-rl logs"),
}
"""What other tools call a command or a kind -> what it is here."""


class Commands(TyperGroup):
    """The commands. A word that is none of them, but of a kind or of another tool, is answered with what to type."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _join_lines(self)

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        if words and self.get_command(context, words[0]) is None and (meant := _meant(words[0])):
            raise UserError(f"there is no command {words[0]!r}{meant}")
        name, command, rest = super().resolve_command(context, words)
        inner = command.get_command(context, rest[0]) if isinstance(command, TyperGroup) and rest else None
        if not context.resilient_parsing:
            begin_command(_still(inner or command))
        return name, command, rest


def _join_lines(command: Any) -> None:
    """Put each paragraph of a help text on one line, for a command and those below it: Typer keeps its line breaks."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        _join_lines(inner)


def _still(command: Any) -> str:
    """Return what a command does, for a user who has waited for a while."""
    does = command.get_short_help_str(limit=200).rstrip(".")
    return f"still at work: {does[:1].lower()}{does[1:]}"


app = typer.Typer(
    name="hpc-rl",
    cls=Commands,
    help="""Post-training of language models on a Slurm cluster.

    Example: hpc-rl submit sft --nodes 2 --gpus-per-node 4 model=qwen2.5-0.5b data.train_files=train.jsonl
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hpc-rl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_KINDS = {kind.name: kind.meaning for kind in offered()}
_KIND = typer.Argument(
    metavar="KIND",
    help="; ".join(f"{name}: {meaning}" for name, meaning in _KINDS.items()) + ".",
    show_default=False,
    **one_of("kind", list(_KINDS)),
)
KindArgument = Annotated[str, _KIND]
OptionalKindArgument = Annotated[str | None, _KIND]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory, name of a run, or job id.", autocompletion=run_names)
]
SiteOption = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="FILE_OR_NAME",
        help="Site profile: a file, or the name of a shipped profile.",
        show_default=False,
        autocompletion=site_names,
    ),
]
RunOrSweepArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run directory, name of a run, sweep or pipeline, or job id.", autocompletion=run_names
    ),
]
OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run directory, name of a run, or job id. The default is the run in ./runs that was submitted last.",
        show_default=False,
        autocompletion=run_names,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


_PROGRAM = "hpc_rl.program"


class CommandWithProgram(TyperCommand):
    """A command whose line may end with `-- PROGRAM ARGUMENTS`, which are kept as typed."""

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        own, program = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
        context.meta[_PROGRAM] = tuple(program)
        return super().parse_args(context, own)


def program_of(context: typer.Context) -> tuple[str, ...]:
    """Return the user's own program and its arguments, from the command line of a CommandWithProgram."""
    found: tuple[str, ...] = context.meta.get(_PROGRAM, ())
    return found


def note(text: str) -> None:
    print(f"hpc-rl: {text}", file=sys.stderr)


def path(text: str) -> Path:
    """Return a path with variables and `~` replaced: a shell replaces neither in `--out=~/x` nor within quotes."""
    from hpc_rl.config.references import expanded_path

    try:
        return Path(expanded_path(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended: 128 + SIGINT."""


def interrupted(run: RunDir) -> int:
    """Report that a run's job continues although the user has pressed Ctrl-C, and return the exit code."""
    from hpc_rl.runs.status import current_job

    note(f"job {current_job(run)} continues; end it with hpc-rl stop {run.name} or hpc-rl cancel {run.name}")
    return INTERRUPTED


def wait_for(run: RunDir, poll: Callable[[], None], saw: Callable[[RunStatus], None]) -> int:
    """Wait until a run's job has ended, and return its exit code. Ctrl-C ends the waiting only.

    Args:
        saw: receives the status of the run whenever Slurm was asked.
    """
    from hpc_rl.runs import control

    try:
        return control.wait(run, poll, saw)
    except KeyboardInterrupt:
        return interrupted(run)


def continue_in_job_python(command: str, packages: Sequence[str], python: str | None = None) -> None:
    """Run this command in the Python of jobs (slurm.python) instead, if this one lacks packages.

    Args:
        python: slurm.python, if the command has read it; otherwise it is that of the site profile.

    Raises:
        UserError: neither has them.
    """
    from hpc_rl.config.references import expanded_path
    from hpc_rl.sites.profile import load_profile
    from hpc_rl.software.installation import install_command
    from hpc_rl.submission.preflight.program import check_packages
    from hpc_rl.system.processes import python_with

    missing = [name for name in packages if python_with(name, None) is None]
    if not missing:
        return
    if python is None and (named := load_profile(None).values.get("slurm.python")):
        try:
            python = expanded_path(named)
        except ValueError as error:
            raise UserError(f"slurm.python: {error}") from error
    names = ", ".join(missing)
    lacking = f"{command} needs {names}, and {sys.executable} lacks {'it' if len(missing) == 1 else 'them'}"
    if python is None:
        raise UserError(
            f"{lacking}: name the Python of your jobs in the site profile (slurm: {{python: /path/to/python}}; hpc-rl "
            f"site show lists its files), or install: {install_command('train', sys.executable)}"
        )
    if problem := check_packages(python, ["hpc_rl", *packages], command):
        raise UserError(f"{lacking}; {problem.partition(':')[0]}. Run the command on a machine that has it")
    note(f"{command} runs in {python} (slurm.python), because this Python lacks {names}")
    sys.stdout.flush()
    os.execv(python, [python, "-P", "-m", "hpc_rl.cli", *sys.argv[1:]])


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    raise typer.Exit(code)
