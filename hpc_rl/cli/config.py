"""The commands `init`, which writes a starter project, and `config`, which shows every option."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from textwrap import fill, indent
from typing import Annotated

import typer

from hpc_rl.cli.app import JsonOption, OptionalKindArgument, SiteOption, app, note
from hpc_rl.cli.completion import sections
from hpc_rl.errors import UserError

FILES = {
    "README.md": "README.md",
    "sft.yaml": "configs/sft.yaml",
    "ppo.yaml": "configs/ppo.yaml",
    "rewards.py": "rewards.py",
}

"""File in `starter` -> path in the project."""

ROWS = {"train": 2000, "val": 100}

_STARTER = Path(__file__).with_name("starter")


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the project, new or existing.", show_default=False)
    ] = Path(),
    model: Annotated[str, typer.Option(help="Model to train: a folder, or a name on the hub.")] = (
        "Qwen/Qwen2.5-0.5B-Instruct"
    ),
) -> None:
    """Write a starter project: options, a reward function, a small data set and a README.

    Example: hpc-rl init my-project
    """
    from hpc_rl.data.arithmetic import generate

    if Path(model).is_dir():
        model = str(Path(model).absolute())
    targets = [folder / target for target in (*FILES.values(), "data/train.jsonl", "data/val.jsonl")]
    if existing := [str(target) for target in targets if target.exists()]:
        raise UserError(f"{', '.join(existing)} already exist, and init never replaces a file: choose another folder")
    try:
        for source, target in FILES.items():
            text = Template((_STARTER / source).read_text()).safe_substitute(model=model)
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            with (folder / target).open("x") as file:  # a link that leads nowhere does not exist, and is not followed
                file.write(text)
        generate(folder / "data", ROWS["train"], ROWS["val"])
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    steps = [] if folder == Path() else [f"cd {folder}"]
    if not Path(model).is_dir():
        steps.append(f"hpc-rl fetch {model}")
    steps += ["hpc-rl submit sft --nodes 2", "hpc-rl submit ppo --nodes 4"]
    print("\n".join(["wrote " + ", ".join(map(str, targets)), "next:", *(f"  {step}" for step in steps)]))


@app.command(context_settings={"help_option_names": []})
def config(
    context: typer.Context,
    kind: OptionalKindArgument = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE|SECTION",
            help="Options, as for submit. Names of sections or keys, such as optim, restrict the output to them.",
            show_default=False,
            autocompletion=sections,
        ),
    ] = None,
    site: SiteOption = None,
    as_json: JsonOption = False,
    show_help: Annotated[
        bool, typer.Option("-h", "--help", help="Also list every key, or those that contain a word: --help rollout.")
    ] = False,
) -> None:
    """Print the resolved configuration. With --help, list every key with its type, default and meaning.

    Example: hpc-rl config sft optim.lr=1e-4
    """
    from hpc_rl.config.compose import compose_partly, dump
    from hpc_rl.config.keys import select
    from hpc_rl.sites.profile import load_profile

    if show_help or kind is None:
        print(context.get_help())
        if kind:
            _print_keys(kind, words or [])
        return
    overrides = [word for word in words or [] if "=" in word]
    selected = [word for word in words or [] if "=" not in word]
    found, missing = compose_partly(kind, overrides, load_profile(site).values)
    values = found.model_dump(mode="json")
    shown = select(values, selected) if selected else values
    print(json.dumps(shown, indent=2) if as_json else dump(shown), end="\n" if as_json else "")
    if missing:
        note(f"required keys without a value: {', '.join(missing)}")


def _print_keys(kind: str, words: Sequence[str]) -> None:
    """Print every documented key of a job kind, or those that contain one of the words."""
    from rich.console import Console
    from rich.markup import escape

    from hpc_rl.config.keys import documented_keys
    from hpc_rl.config.kinds import KINDS
    from hpc_rl.liveness.shown_text import terminal

    rows = [row for row in documented_keys(KINDS[kind].schema) if not words or any(word in row[0] for word in words)]
    if not rows:
        raise UserError(f"config {kind} --help {' '.join(words)}: no key contains this word")
    console = Console(highlight=False, file=terminal(sys.stdout))
    for key, type_name, default, meaning in rows:
        console.print(
            f"[bold]{key}[/bold] = {escape(default)}  [dim]({escape(type_name)})[/dim]", soft_wrap=True, markup=True
        )
        console.print(indent(fill(meaning, console.width - 5), "    "), markup=False)
