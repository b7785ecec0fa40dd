"""The application, and the arguments and words that several commands share."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from hpc_rl.cli.completion import run_names

app = typer.Typer(
    name="hpc-rl",
    help="""Post-training of language models on a Slurm cluster.

    Example: hpc-rl submit sft --nodes 2 --gpus-per-node 4 model=qwen2.5-0.5b data.train_files=train.jsonl
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Kind(StrEnum):
    sft = "sft"
    ppo = "ppo"
    torchrun = "torchrun"
    ray = "ray"


KindArgument = Annotated[
    Kind,
    typer.Argument(
        metavar="KIND",
        help="sft: supervised fine-tuning; ppo: reinforcement learning; torchrun, ray: your own program of that kind.",
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory, name of a run, or job id.", autocompletion=run_names)
]
SiteOption = Annotated[
    str | None,
    typer.Option("--site", metavar="FILE_OR_NAME", help="Site profile: a file, or a shipped one.", show_default=False),
]
RunOrSweepArgument = Annotated[
    str, typer.Argument(metavar="RUN_OR_SWEEP", help="Run directory, name of a run or sweep, or job id.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def note(text: str) -> None:
    print(f"hpc-rl: {text}", file=sys.stderr)


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    raise typer.Exit(code)
