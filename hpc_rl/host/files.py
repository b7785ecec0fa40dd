"""Helpers for files: follow, read the end, read JSON, replace atomically."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from hpc_rl.errors import RunError, UserError
from hpc_rl.host.disk import UNWRITABLE, explained

MOST_PENDING_BYTES = 16 * 2**20
"""Lines that a `LineFile` keeps while it cannot write; older ones are lost."""


class Follower:
    """Reads the text that is appended to a file. The file may be created later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        # A read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @classmethod
    def at_end(cls, path: Path) -> Self:
        """Follow a file from its present end."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def new_text(self) -> str:
        """Return what was appended since the last call."""
        try:
            with open_regular(self.path) as log:
                log.seek(self._offset)
                new = log.read()
        except FileNotFoundError:
            return ""
        self._offset += len(new)
        return self._decoder.decode(new)


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file for reading without waiting, as opening a FIFO would.

    Raises:
        FileNotFoundError: there is no regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return file


class LineFile:
    """Appends lines to a file. What a full file system does not take is kept, and written when there is space again.

    A line that a killed process left unfinished is ended first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self._pending = b"\n" if unfinished else b""
        self._is_failing = False

    def write(self, *lines: str) -> None:
        """Append lines; they are in the file when this returns, unless the file system is full or read-only."""
        self._pending += "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
        if len(self._pending) > MOST_PENDING_BYTES:
            start = self._pending.find(b"\n", len(self._pending) - MOST_PENDING_BYTES) + 1
            self._pending = self._pending[start:]
        self.flush()

    def flush(self) -> None:
        """Try to write what could not be written before."""
        try:
            if self._pending:
                self._append()
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            if not self._is_failing:
                print(f"warning: {self.path} cannot be written: {explained(error, self.path)}", file=sys.stderr)
            self._is_failing = True
            return
        if self._is_failing:
            print(f"{self.path} can be written again", file=sys.stderr)
        self._is_failing = False

    def _append(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            while self._pending:
                self._pending = self._pending[os.write(descriptor, self._pending) :]
        finally:
            os.close(descriptor)


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log, indented. Only the end of a large log is read."""
    try:
        with open_regular(path) as log:
            log.seek(max(0, path.stat().st_size - 200 * lines))
            found = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join("    " + line for line in found[-lines:])


def read_json(path: Path | str) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing, unreadable or incomplete."""
    try:
        with open_regular(path) as file:
            found = json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def folder_state(folder: Path) -> list[tuple[str, int, int]]:
    """Return (name, bytes, time of the last change in ns) of each file in a folder, which differ after the files have
    been written again; nothing if there is no such folder. Hidden files are left out."""
    files = sorted(file for file in folder.glob("[!.]*") if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename it to `path` if the block succeeds.

    Readers see the old file or the new one, never a part of it. If the block fails, nothing is left. The temporary name
    contains the host and the process, so that the nodes of a job do not share one.
    """
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a killed process, or a link that would lead elsewhere
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise RunError if the block, which writes a file or folder, raises OSError: a full disk, for example."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written: {explained(error, path)}") from error


def refuse_occupied(folder: Path) -> None:
    """Raise UserError if a folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another folder")


def write_atomically(path: Path, text: str, forbidden: int = 0) -> None:
    """Write a text file so that readers never see a part of it.

    Args:
        forbidden: permissions that it does not get, whatever the umask; 0o022 if only its owner may change it.
    """
    with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
        if forbidden:
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~forbidden)
        file.write(text)


def write_synced(path: Path, text: str) -> None:
    """Write a text file and force it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Force the contents of a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every network file system can do it
            raise
    finally:
        os.close(descriptor)


def replace_synced(path: Path, text: str) -> None:
    """Write a text file like `write_atomically`, so that it is complete after a power failure too."""
    with replacing(path) as partial:
        write_synced(partial, text)
    sync_folder(path.parent)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line, atomically. Values that JSON lacks, such as dates, are written as text.

    Returns:
        the number of rows.

    Raises:
        UserError: the folder cannot be written.
    """
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("x", encoding="utf-8") as lines:
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return count
