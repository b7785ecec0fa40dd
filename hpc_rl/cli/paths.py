"""The type of options and arguments that are paths."""

from __future__ import annotations

from pathlib import Path

import typer


def path(text: str) -> Path:
    """Return a path with variables and `~` replaced: a shell replaces neither in `--out=~/x` nor within quotes."""
    from hpc_rl.config.references import expanded_path

    try:
        return Path(expanded_path(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
