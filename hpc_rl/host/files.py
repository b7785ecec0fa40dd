"""Text files: follow, read the end, write whole or not at all."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError


class Follower:
    """Reads what is new in a text file; the file may come later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        # A read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def new_text(self) -> str:
        """What was appended since the last call."""
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                new = log.read()
        except FileNotFoundError:
            return ""
        self._offset += len(new)
        return self._decoder.decode(new)


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, indented; of a large one only the end is read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 200 * lines))
            found = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join("    " + line for line in found[-lines:])


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing, unreadable or incomplete."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that no reader ever sees a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line under a temporary name and rename it; returns the number of rows.

    Raises:
        UserError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8") as lines:
                for row in rows:
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return count
