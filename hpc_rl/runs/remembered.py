"""The list of folders in which this user has submitted runs.

They are the lines of ~/.local/state/hpc-rl/run-folders, the newest first ($XDG_STATE_HOME replaces ~/.local/state:
https://specifications.freedesktop.org/basedir-spec/latest/).
"""

from __future__ import annotations

import os
from pathlib import Path

from hpc_rl.system.ownership import is_own_folder, open_own


def folders() -> list[Path]:
    """Return the folders that still exist and belong to this user."""
    path = list_file()
    return [] if path is None else [folder for line in lines(path) if is_own_folder(folder := Path(line))]


def list_file() -> Path | None:
    """Return the path of the list; None if the home folder is unknown."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    except RuntimeError:
        return None
    return folder / "hpc-rl" / "run-folders"


def lines(path: Path) -> list[str]:
    """Return the lines of the list; none if it does not exist, or somebody else can write to it."""
    try:
        with open_own(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
