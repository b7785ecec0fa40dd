"""The command `adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import app, note, path
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted


@app.command()
def adopt(
    script: Annotated[Path, typer.Argument(parser=path, metavar="SCRIPT", help="Script for sbatch. It is not run.")],
) -> None:
    """Print the command, and the lines for a site profile, that do the same as an sbatch script of your own.

    The output is a script of bash: hpc-rl adopt train.sbatch > submit.sh. Its comments list what could not be carried
    over, what to check, and what hpc-rl makes superfluous. Standard error shows only how many parts were not carried
    over.

    Example: hpc-rl adopt train.sbatch
    """
    from hpc_rl.submission.adoption.script import adopt as read
    from hpc_rl.submission.adoption.text import adoption_text

    try:
        text = script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise UserError(f"{script}: {found}: name the script that you submit with sbatch") from error
    adopted = read(text, str(script))
    print(adoption_text(adopted, script.name, f"{script.stem}.site.yaml"), end="")
    if adopted.lost:
        note(f"{counted(len(adopted.lost), 'part')} of the script not carried over: read the comments of the output")
