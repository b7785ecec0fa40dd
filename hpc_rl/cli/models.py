"""`export`: trained models for other programs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import app
from hpc_rl.errors import UserError
from hpc_rl.host.installation import install_command


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model; it must not exist or be empty.")],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Type of the weights. The default is the type of the training.", show_default=False),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model folder.

    Example: hpc-rl export sft-1 models/mine --dtype bfloat16
    """
    from hpc_rl.runs.status import find_run

    folder = Path(source) if Path(source, "trainer.json").is_file() else find_run(source).path
    try:
        from hpc_rl.training.export import export as export_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"export needs {error.name}, which is not installed: {install_command('train', sys.executable)}"
        ) from error
    from transformers.utils import logging

    logging.disable_progress_bar()
    export_model(folder, out, dtype)
    print(f"wrote {out}")
