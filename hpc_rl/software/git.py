"""Questions to git about a folder whose repository may come from an archive.

The configuration of a repository can name programs: for signatures, comparisons, filters, hooks, and the transport of
missing objects. None of them runs here. Settings of the user that change how git prints are overruled too, so that what
it prints is a patch. Filters of the user's own configuration, such as that of Git LFS, stay.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

TIMEOUT_S = 20
_OFF = (
    *("core.fsmonitor=false", "core.hooksPath=/dev/null", "core.pager=cat", "core.untrackedCache=false"),
    *("log.showSignature=false", "color.ui=false", "safe.bareRepository=explicit", "protocol.allow=never"),
)
_NO_TRANSPORT = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none", "GIT_OPTIONAL_LOCKS": "0"}
_OF_OTHERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE")
"""Variables that lead to another repository than that of the folder, for example those of a hook."""
_FILTER = r"^filter\..*\.(clean|smudge|process|required)$"


def commit(folder: Path) -> str | None:
    """Return lines about the newest commit of the repository that contains a folder, None if there is none."""
    return _git(folder, "log", "-1", "--no-show-signature", "--format=commit %H%ndate %cI%nsubject %s")


def branch(folder: Path) -> str:
    """Return the name of the branch."""
    return _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or ""


def changes(folder: Path) -> str:
    """Return the files that differ from the newest commit, and the differences as a patch.

    Of submodules, only another commit is shown: git would read their configuration, too.
    """
    no_filters, submodules = _without_filters(folder), "--ignore-submodules=dirty"
    status = _git(folder, "status", "--porcelain", "--untracked-files=normal", submodules, settings=no_filters)
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/")
    patch = _git(folder, "diff", "--patch", *plain, "--submodule=short", submodules, "HEAD", settings=no_filters)
    return (status or "") + (patch or "")


def _without_filters(folder: Path) -> dict[str, str]:
    """Return settings that replace the filters in a repository's own configuration by those of the user, if any."""
    asked = ("--includes", "--name-only", "--null", "--get-regexp", _FILTER)
    names = "".join(_git(folder, "config", where, *asked) or "" for where in ("--local", "--worktree")).split("\0")
    owns = {name: _git(folder, "config", "--global", "--includes", "--get", name) for name in filter(None, names)}
    return {
        name: own.rstrip("\n") if own else "false" if name.endswith(".required") else "" for name, own in owns.items()
    }


def _git(folder: Path, *arguments: str, settings: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Return what git prints, None if it fails.

    Args:
        settings: in variables, because names with an equals sign cannot be options.
    """
    off = [word for setting in _OFF for word in ("-c", setting)]
    environ = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS} | _NO_TRANSPORT
    first = int(environ.get("GIT_CONFIG_COUNT") or 0)
    for number, (name, value) in enumerate(settings.items(), first):
        environ |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    if settings:
        environ["GIT_CONFIG_COUNT"] = str(first + len(settings))
    try:
        done = subprocess.run(
            ["git", "--no-pager", *off, "-C", str(folder), *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
