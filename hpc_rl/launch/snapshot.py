"""What code a run was started from."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

MAX_BYTES = 1_000_000
TIMEOUT_S = 20


@cache  # once for all runs of a sweep
def git_snapshot(folder: Path) -> str:
    """Commit, branch and uncommitted changes of the repository around a folder; one line where there is none."""
    head = _git(folder, "log", "-1", "--format=commit %H%ndate %cI%nsubject %s")
    if head is None:
        return f"{folder} is in no git repository\n"
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or ""
    changes = (_git(folder, "status", "--porcelain") or "") + (_git(folder, "diff", "HEAD") or "")
    if len(changes) > MAX_BYTES:
        changes = changes[:MAX_BYTES] + "\n[cut]\n"
    return f"{head}branch {branch}\n{changes or 'no uncommitted changes'}".rstrip() + "\n"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
