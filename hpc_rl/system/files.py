"""Helpers for files: follow, read the end, read JSON, replace atomically."""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from hpc_rl.errors import RunError, UserError
from hpc_rl.system.disk import UNWRITABLE, explained

MOST_BYTES = 64 * 2**20
"""Of a file that is read whole; those of runs and models have much less."""
MOST_LINE_BYTES = 2**20
"""Of a line of a file of a run; longer ones are left out."""
ATTEMPT = re.compile(r"attempt-(\d{1,9})")
"""Name of the folder of an attempt in a run directory."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
MOST_PENDING_BYTES = 16 * 2**20
"""Lines that a `LineFile` keeps while it cannot write; older ones are lost."""


class Follower:
    """Reads the text that is appended to a file of a run. The file may be created later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        # A read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.rest = ""
        """The line that is not complete yet."""

    @classmethod
    def at_end(cls, path: Path, most: int = 0) -> Self:
        """Follow a file from its present end, or from so many bytes before it."""
        return cls(path, max(0, path.stat().st_size - most) if path.exists() else 0)

    def new_text(self) -> str:
        """Return what was appended since the last call, at most MOST_BYTES of it."""
        try:
            with open_regular(self.path) as log:
                log.seek(self._offset)
                new = log.read(MOST_BYTES)
        except FileNotFoundError:
            return ""
        self._offset += len(new)
        return self._decoder.decode(new)

    def new_lines(self) -> list[str]:
        """Return the lines that were completed since the last call; those longer than MOST_LINE_BYTES in parts."""
        *lines, self.rest = (self.rest + self.new_text()).split("\n")
        if len(self.rest) > MOST_LINE_BYTES:
            lines.append(self.rest)
            self.rest = ""
        return lines


def open_regular(path: Path | str, *, named: bool = False) -> IO[bytes]:
    """Open a regular file for reading, without waiting as for a FIFO. Its kind and owner are those of the open file.

    Args:
        named: whether the user has named this file or its folder, such as a model's, and may have named a link. Without
            it, the file is part of a folder such as a run directory, whose owner may be another user: no link is
            followed from there on, and the file belongs to the owner of the folder, or to root.

    Raises:
        NotPlainError: it is no such file.
        OSError: it cannot be opened.
    """
    try:
        file, owners = (os.open(path, _READ), None) if named else _open_in_folder(Path(path))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise NotPlainError(errno.ENOENT, "it is a link, or below one", str(path)) from error
        raise
    found = os.fstat(file)
    problem = "" if stat.S_ISREG(found.st_mode) else "it is not a regular file"
    if not problem and owners is not None and found.st_uid not in owners:
        problem = "it belongs to another user than its folder"
    if problem:
        os.close(file)
        raise NotPlainError(errno.ENOENT, problem, str(path))
    return os.fdopen(file, "rb")


class NotPlainError(FileNotFoundError):
    """There is a file, but reading it could wait forever, or give away another one."""


def _open_in_folder(path: Path) -> tuple[int, tuple[int, ...]]:
    """Open a file through no link below its folder, or below the run directory that has its attempt.

    Returns:
        the descriptor, and the users to whom the file may belong.
    """
    above = [number for number, name in enumerate(path.parts) if ATTEMPT.fullmatch(name)]
    first = above[-1] if above else len(path.parts) - 1
    folder = os.open(Path(*path.parts[:first]), _FOLDER)
    try:
        owner = os.fstat(folder).st_uid
        for name in path.parts[first:-1]:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
            if os.fstat(folder).st_uid != owner:
                raise NotPlainError(errno.ENOENT, "it is in a folder of another user", str(path))
        file = os.open(path.name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
    # For root, a file of root in the folder of another user is a hard link that this user has made.
    return file, (owner, 0) if os.geteuid() else (owner,)


def read_regular(path: Path | str, most: int = MOST_BYTES, *, named: bool = False, most_own: int = 0) -> bytes:
    """Read a whole file; see `open_regular`.

    Args:
        most: bytes that it may have.
        most_own: bytes that a file of this user may have, if that is more.

    Raises:
        NotPlainError: it is no such file.
        OSError: it cannot be read, or is larger.
    """
    with open_regular(path, named=named) as file:
        state = os.fstat(file.fileno())
        most = max(most, most_own) if state.st_uid == os.geteuid() else most
        found = file.read(most + 1) if state.st_size <= most else b" " * (most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return found


def last_lines_of(file: IO[bytes], most: int, longest: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines at the end of a file, with their line ends. The first may be cut off. Longer ones are left out.

    Args:
        most: bytes at the end that are read.
        longest: bytes of a line.
    """
    file.seek(max(0, os.fstat(file.fileno()).st_size - most))
    left = most
    while left > 0 and (line := file.readline(min(longest, left) + 1)):
        left -= len(line)
        if line.endswith(b"\n") or len(line) <= longest:
            yield line
            continue
        while left > 0 and line and not line.endswith(b"\n"):
            line = file.readline(min(longest, left) + 1)
            left -= len(line)


def open_to_append(path: Path | str, mode: int = 0o666) -> IO[bytes]:
    """Open a regular file, or create it, to append to it. No link is followed, and nothing is buffered.

    Raises:
        OSError: it is a link or not a regular file, or cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    os.set_blocking(file, True)  # for the programs that inherit it
    return os.fdopen(file, "ab", buffering=0)


class LineFile:
    """Appends lines to a file. What a full file system does not take is kept, and written when there is space again.

    A line that a killed process left unfinished is ended first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._pending = b"\n" if _is_unfinished(path) else b""
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
        with open_to_append(self.path) as file:
            while self._pending:
                self._pending = self._pending[file.write(self._pending) :]


def _is_unfinished(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # it is missing or empty
        return False


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes of a file of a run; nothing if there is no such file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except FileNotFoundError:
        return b""


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log, indented. Only the end of a large log is read."""
    found = read_end(path, 200 * lines).decode(errors="replace").splitlines()
    return "\n".join("    " + line for line in found[-lines:])


def read_json(path: Path | str, *, named: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing, unreadable, too large or incomplete.

    Args:
        named: see `open_regular`.
    """
    try:
        found = json.loads(read_regular(path, named=named).decode())
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
    """Yield a temporary path in the same folder, and rename it to `path` if the block succeeds. The block creates the
    file with mode "x", which follows no link that another user has made meanwhile.

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
    with os.fdopen(os.open(path, _WRITE, 0o666), "w", encoding="utf-8") as file:
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
