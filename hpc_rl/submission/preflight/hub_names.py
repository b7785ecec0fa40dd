"""Names that may be local paths or names on the hub. A mistyped path must not be looked up there."""

from __future__ import annotations

import difflib
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.formats.hub import hub_problem
from hpc_rl.submission.hub import HubCache

MOST_NAMED = 5
"""Folders that a message lists."""
_ALIKE = 0.75
"""How similar a local name is to one that was mistyped: `data` to `dta`, but not `open-r1` to `openai`."""


def refuse_mistyped(what: str, name: str, folders_only: bool) -> None:
    """Check that a name is not a local path with a mistake. Call it if neither the path nor the cache has it.

    Args:
        what: key and name, for the message.
        folders_only: whether the name can only be that of a folder.

    Raises:
        UserError: its parent folder exists, or something here has nearly the same name.
    """
    parent, first = Path(name).parent, Path(name).parts[0]
    if parent != Path() and parent.is_dir():
        names = _names(parent, folders_only)
        close = _closest(Path(name).name, names)
        listed = ", ".join(sorted(set(names.values()))[:MOST_NAMED]) or "none"
        hint = f"did you mean {parent / close}?" if close else f"it has {listed}."
        kind = "folder" if folders_only else "file or folder"
        raise UserError(f"{what}: the folder {parent} has no such {kind}; {hint} {_otherwise(name)}")
    if close := _closest(first, _names(Path(), folders_only)):
        rest = name.removeprefix(first)
        raise UserError(f"{what}: there is no such path here; did you mean {close}{rest}? {_otherwise(name)}")


def look_up(what: str, name: str, kind: str, cache: HubCache) -> str:
    """Check on the login node that the job can load what is neither a path here nor in the cache.

    Args:
        what: key and name, for the message.
        kind: "model" or "data set".

    Returns:
        a note for the user.

    Raises:
        UserError: the hub has no such model or data set, or cannot be reached.
    """
    if cache.has_own_hub:
        return f"{kind} {name} is looked up when the job starts, because the job has its own HF_ENDPOINT"
    if problem := hub_problem(name, kind):
        where = cache.models if kind == "model" else cache.datasets
        raise UserError(
            f"{what} is not a path here and not in the cache {where}, and {problem}: correct the path or the name, or "
            f"run hpc-rl fetch {name} where the hub can be reached"
        )
    return f"{kind} {name} is a name on the hub: the job downloads it"


def not_cached(what: str, name: str, where: Path, offline: str) -> str:
    """Return the message for a name that the job cannot look up.

    Args:
        offline: the setting by which it is offline.
    """
    return (
        f"{what} is not a path here and not in the cache {where}, and compute nodes are offline ({offline}): correct "
        f"the path, or run hpc-rl fetch {name}"
    )


def _names(folder: Path, folders_only: bool) -> dict[str, str]:
    """Return the entries of a folder by their names, and by those without a suffix."""
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return {}
    names = [path.name for path in found if path.is_dir() or not folders_only]
    return {Path(name).stem: name for name in names} | {name: name for name in names}


def _closest(name: str, names: dict[str, str]) -> str | None:
    close = difflib.get_close_matches(name, names, n=1, cutoff=_ALIKE)
    return names[close[0]] if close else None


def _otherwise(name: str) -> str:
    return f"If it is a name on the hub: hpc-rl fetch {name}"
