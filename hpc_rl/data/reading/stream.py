"""A process that reads a data set on the hub window after window, without a download of all of it.

    python -m hpc_rl.data.reading.stream FD

A window is the next data.stream_rows rows; windows.py starts this process beside a rank, and names over the socket FD a
data set, and then the windows and the files to write them to. Reading has a process of its own so that it takes no time
from the interpreter of the rank, and so that it can be ended: libraries wait for some answers of a hub forever.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_rl.data.reading.arrow_values import as_written
from hpc_rl.data.reading.formats import Row, needed, refuse_broken_text
from hpc_rl.data.reading.hub import library, parts_of, split_of
from hpc_rl.data.reading.sources import BLOCK_ROWS
from hpc_rl.errors import UserError
from hpc_rl.formats.hub import hub_address
from hpc_rl.system.files import writing
from hpc_rl.system.processes import die_with_parent

if TYPE_CHECKING:
    from datasets import IterableDataset

Cursor = dict[str, Any]
"""The place of a row: `state`, as `IterableDataset.state_dict` describes it, and `by`, what this text depends on."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
"""Time before a hub that has failed is asked again: the first time, and at most."""
_ALIVE_EVERY_S = 1.0
_CLIENTS = ("httpcore", "httpx", "requests", "urllib3")
"""Packages, and beginnings of their names, whose errors are those of a connection."""
_REPEATS = "datasets.utils.file_utils"
"""Logger of the code that repeats requests."""
_ANSWERS_LATER = (408, 429)
"""Statuses below 500 of a request that may succeed later: timeout, too many requests."""


@dataclass(frozen=True)
class DataSet:
    """What is read."""

    name: str
    """A folder, a name on the hub, or `name:configuration`."""
    split: str
    columns: tuple[str, ...]
    """Those that are needed; see `read_some` in formats.py."""
    commit: str | None
    """Its version. None: the newest one of the branch main."""
    cache: Path
    """A folder of its own for `datasets`, which would otherwise read what it once prepared if the hub does not answer.
    """


@dataclass(frozen=True)
class WindowRequest:
    """A window to write."""

    path: Path
    """JSON lines, one for each row. The file has this name when it is complete."""
    first: int
    """Number of its first row in the data set, from 0."""
    rows: int
    """Its most rows."""
    cursor: Cursor | None
    """The place of its first row. None: rows are counted from the beginning."""


class VersionKnown(NamedTuple):
    """The hub has answered, and the version of the data set is known. It is the first message of a process."""

    commit: str


class RowsArrived(NamedTuple):
    """Rows arrive."""


class HubFailed(NamedTuple):
    """The hub has failed, and is asked again."""

    reason: str


class WindowDone(NamedTuple):
    """A window is complete."""

    is_last: bool
    """Whether the data set ends with it."""
    next: Cursor | None
    """The place after its last row."""


Message = VersionKnown | RowsArrived | HubFailed | WindowDone | UserError


class Stream:
    """The rows of a data set, from any place on. A hub that fails for a while is asked until it answers.

    Args:
        report: receives what happens meanwhile.
    """

    def __init__(self, data: DataSet, report: Callable[[Message], None]) -> None:
        self.row = 0
        """Number of the next row."""
        self.cursor: Cursor | None = None
        """Its place."""
        self.name = data.name
        self._data, self._report = data, report
        self._commit: str | None = None
        self._by = f"datasets {library(data.name).__version__}: {', '.join(data.columns)}"
        self._stream: IterableDataset | None = None
        self._rows: Iterator[Row] | None = None
        self._ahead: list[Row] = []
        """The next row, which shows that there is one; empty at the end."""
        self._alive_at = 0.0

    @property
    def is_at_end(self) -> bool:
        """Whether the row that was taken last is the last one of the data set."""
        return not self._ahead

    def seek(self, row: int, cursor: Cursor | None) -> None:
        """Continue with a row. Without its place, or with one that was noted by something else, all rows before it are
        read.

        Raises:
            UserError: the data set cannot be read, or has no such row.
        """
        if self._rows is not None and row == self.row:
            return
        self.close()
        is_known = cursor is not None and cursor["by"] == self._by
        self.row, self.cursor = (row, cursor) if is_known else (0, None)
        while self.row < row:
            if not self.take(min(BLOCK_ROWS, row - self.row)):
                raise UserError(
                    f"the data set {self._data.name!r} has {self.row:,} rows, and row {row + 1:,} is needed"
                )

    def take(self, count: int) -> list[Row]:
        """Return the next rows; fewer at the end of the data set.

        Raises:
            UserError: the data set cannot be read, and to try again would not help.
        """
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                found = self._take(count)
                break
            except UserError:
                raise
            except Exception as error:  # what HTTP clients and formats raise has no base class
                self.close()
                reason = _reason(error)
                if not is_temporary(error):
                    raise UserError(f"cannot read {self._data.name} from {hub_address()}: {reason}") from error
                print(f"warning: {hub_address()} failed ({reason}); trying again", file=sys.stderr, flush=True)
                self._report(HubFailed(reason))
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self.row += len(found)
        if time.monotonic() - self._alive_at > _ALIVE_EVERY_S:
            self._alive_at = time.monotonic()
            self._report(RowsArrived())
        return found

    def close(self) -> None:
        """Forget the connection and what was read ahead."""
        self._stream, self._rows, self._ahead = None, None, []

    def _take(self, count: int) -> list[Row]:
        if self._stream is None or self._rows is None:
            self._open()
        assert self._stream is not None and self._rows is not None
        found = [*self._ahead, *islice(self._rows, count - len(self._ahead))]
        state = self._stream.state_dict()
        self._ahead = list(islice(self._rows, 1))
        self.cursor = {"by": self._by, "state": state}
        return found

    def _open(self) -> None:
        if self._commit is None:
            self._commit = commit_of(self._data.name, self._data.commit)
            self._report(VersionKnown(self._commit))
        self._stream = _opened(self._data, self._commit)
        if self.cursor is not None:
            self._stream.load_state_dict(self.cursor["state"])
        self._rows = iter(self._stream)


def commit_of(name: str, revision: str | None) -> str:
    """Return the commit of a revision of a data set, None: of main. It raises what huggingface_hub raises."""
    from huggingface_hub import HfApi

    found = HfApi().dataset_info(parts_of(name)[0], revision=revision, timeout=30).sha
    assert found is not None
    return found


def _opened(data: DataSet, commit: str) -> IterableDataset:
    """Return a stream of the columns that are needed. It raises what `datasets` raises, and UserError."""
    datasets = library(data.name)
    path, configuration = parts_of(data.name)

    def load(**options: Any) -> IterableDataset:
        splits = datasets.load_dataset(
            path, configuration, revision=commit, streaming=True, cache_dir=str(data.cache), **options
        )
        found: IterableDataset = split_of(splits, data.name, data.split)
        return found

    found = load()
    columns = needed(data.columns, found.column_names or ())
    if columns is None:
        return found
    if found.info.builder_name == "parquet":  # it then asks the hub only for the parts of a file with these columns
        found = load(columns=columns)
    return found.select_columns(columns)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def is_temporary(error: BaseException) -> bool:
    """Return whether the hub may answer later: a connection failed, or a status says so. What caused an error counts
    too, because libraries translate errors."""
    found: BaseException | None = error
    while found is not None:
        status = getattr(getattr(found, "response", None), "status_code", None)
        if status is not None:
            return status >= 500 or status in _ANSWERS_LATER
        if isinstance(found, ConnectionError | TimeoutError) or type(found).__module__.startswith(_CLIENTS):
            return True
        found = found.__cause__ or found.__context__
    return False


def write_window(stream: Stream, order: WindowRequest) -> WindowDone:
    """Write a window.

    Raises:
        UserError: the data set cannot be read.
        RunError: the file cannot be written.
    """
    count, partial = 0, order.path.with_suffix(".partial")
    with writing(order.path):
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            stream.seek(order.first, order.cursor)
            while count < order.rows and (block := stream.take(min(BLOCK_ROWS, order.rows - count))):
                for number, row in enumerate(block, start=order.first + count + 1):
                    refuse_broken_text(row, f"{stream.name}, row {number:,}")
                file.writelines(map(_line, block))
                count += len(block)
        partial.replace(order.path)
    return WindowDone(stream.is_at_end, stream.cursor)


def _line(row: Row) -> bytes:
    """Return a row as JSON. Values such as images become null, which training refuses where it reads them."""
    found = {name: as_written(value) for name, value in row.items()}
    return json.dumps(found, ensure_ascii=False, default=lambda _: None).encode() + b"\n"


class _Repeated(logging.Handler):
    """Reports what `datasets` writes to its log when it repeats a request, which it does for minutes."""

    def __init__(self, report: Callable[[Message], None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Report the error that is being handled, or else the text of the log."""
        error = sys.exception()
        self._report(HubFailed(_reason(error) if error is not None else record.getMessage()))


def serve(fd: int) -> None:
    """Write windows until the socket is closed."""
    die_with_parent()
    connection: Connection[Any, Any] = Connection(fd)
    sending = threading.Lock()  # what reads parquet has threads, which report failures too

    def send(message: Message) -> None:
        try:
            with sending:
                connection.send(message)
        except OSError:  # the rank has ended
            sys.exit(1)

    logging.getLogger(_REPEATS).addHandler(_Repeated(send))
    try:
        data: DataSet = connection.recv()
        library(data.name).disable_progress_bars()  # their control characters would fill log files
        stream = Stream(data, send)
        while True:
            send(write_window(stream, connection.recv()))
    except UserError as error:
        send(error)
    except (EOFError, ConnectionResetError):
        return


if __name__ == "__main__":
    from hpc_rl.data.reading import stream  # messages are pickled by the name of their module, which is not __main__

    stream.serve(int(sys.argv[1]))
