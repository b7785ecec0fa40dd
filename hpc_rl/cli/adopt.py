"""The command `adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import app, note, path
from hpc_rl.errors import UserError


@app.command()
def adopt(
    script: Annotated[Path, typer.Argument(parser=path, metavar="SCRIPT", help="Script for sbatch. It is not run.")],
) -> None:
    """Print the command, and the lines for a site profile, that do the same as an sbatch script of your own.

    The output is a script of bash: hpc-rl adopt train.sbatch > submit.sh. Its comments list what could not be carried
    over, what to check, and what hpc-rl makes superfluous. Standard error has only the number of lines that were not
    carried over.

    Example: hpc-rl adopt train.sbatch
    """
    from hpc_rl.submission.adoption.script import adopt as read
    from hpc_rl.submission.adoption.text import adoption_text

    try:
        text = script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{script}: {error.strerror if isinstance(error, OSError) else 'it is no text file'}"
        ) from error
    found = read(text, str(script))
    print(adoption_text(found, script.name, f"{script.stem}.site.yaml"), end="")
    if found.lost:
        note(f"not carried over: {len(found.lost)}; the comments above the command list it")
