"""Ray's session logs, which lie on the node's own disk and go when the job does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

MOST_FILES = 400
FILE_BYTES = 1_000_000
"""Of a longer log the end is kept."""
_SUFFIXES = (".log", ".out", ".err", ".txt")
_FIRST = ("raylet", "gcs_server", "ray_process", "dashboard", "runtime_env", "log_monitor", "monitor")
"""What tells most about a node; workers' logs follow, the newest first."""


def copy_logs(temp_dir: Path, target: Path) -> None:
    """Copy what is text and not empty, as much as fits into MOST_FILES files of FILE_BYTES each."""
    for log in list(_ordered(temp_dir))[:MOST_FILES]:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy_end(log, target / log.name)


def _ordered(temp_dir: Path) -> Iterator[Path]:
    logs = [
        (path, path.stat())
        for path in temp_dir.glob("session_2*/logs/*")
        if path.suffix in _SUFFIXES and path.is_file() and not path.is_symlink()
    ]
    full = [(path, stat.st_mtime) for path, stat in logs if stat.st_size]
    first = [path for path, _ in full if path.name.startswith(_FIRST)]
    others = sorted((mtime, path) for path, mtime in full if not path.name.startswith(_FIRST))
    yield from sorted(first)
    yield from (path for _, path in reversed(others))


def _copy_end(source: Path, target: Path) -> None:
    with source.open("rb") as log, target.open("wb") as copy:
        skipped = source.stat().st_size - FILE_BYTES
        if skipped > 0:
            log.seek(skipped)
            copy.write(f"[the first {skipped} bytes are left out]\n".encode())
        shutil.copyfileobj(log, copy)
