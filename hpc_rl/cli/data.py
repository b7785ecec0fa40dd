"""`data`: data sets in the form that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import app

data_app = typer.Typer(
    help="Prepare data sets.\n\nExample: hpc-rl data arithmetic --out data/sums",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")


@data_app.command()
def gsm8k(
    source: Annotated[str, typer.Option(help="Raw GSM8K: a folder or file of jsonl, or a `datasets` name.")],
    out: Annotated[Path, typer.Option(help="Folder for train.jsonl and test.jsonl.")],
) -> None:
    """Grade-school mathematics (Cobbe et al. 2021) as chat messages.

    Example: hpc-rl data gsm8k --source openai/gsm8k:main --out data/gsm8k
    """
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
    """Made-up sums as chat messages: small enough to learn on a laptop.

    Example: hpc-rl data arithmetic --out data/sums --train 4000
    """
    from hpc_rl.data.arithmetic import generate

    _print_counts(out, generate(out, train, val, seed, careless))


def _print_counts(out: Path, counts: dict[str, int]) -> None:
    for name, rows in counts.items():
        print(f"{out / name}.jsonl: {rows} rows")
