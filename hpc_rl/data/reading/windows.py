"""Windows of a data set on the hub: which rows each one has, and the process that reads them (stream.py).

Windows are numbered from 0 over all passes over the data set. The last window of a pass has the rows that are left, and
the first one follows it. The number of windows of a pass is known as soon as the first pass has ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_rl.data.reading.formats import Row, read_some
from hpc_rl.data.reading.sources import BLOCK_ROWS, chunks
from hpc_rl.data.reading.stream import Cursor, DataSet, HubFailed, RowsArrived, VersionKnown, WindowDone, WindowRequest
from hpc_rl.errors import RunError, UserError
from hpc_rl.formats.hub import hub_address
from hpc_rl.system.files import replace_synced, writing
from hpc_rl.system.scratch import remove_tree
from hpc_rl.system.worker_process import ProcessLost, WorkerProcess

PATIENCE_S = 600.0
"""Longest time that a run waits for the next rows while it trains."""
FIRST_PATIENCE_S = 120.0
"""The same before the hub has answered for the first time in an attempt: the nodes may have no internet."""
_POLL_S = 1.0
_SEND_S = 10.0
LOG = "windows.json"


@dataclass
class WindowLog:
    """windows.json: the version of the data set that a run reads, and where its windows begin."""

    name: str
    rows: int
    """Rows of a window."""
    commit: str | None = None
    cursors: list[Cursor | None] = field(default_factory=lambda: [None])
    """The place of the first row of each window of a pass, as far as they are known."""
    count: int | None = None
    """Windows of a pass, if its end is known."""

    def place(self, window: int) -> int:
        """Return the number of a window in its pass."""
        return window if self.count is None else window % self.count

    def note(self, window: int, written: WindowDone) -> None:
        """Note where the windows after this one begin."""
        place = self.place(window)
        if written.is_last:
            self.count = place + 1
        elif place + 1 == len(self.cursors):
            self.cursors.append(written.next)


def read_log(folder: Path, name: str, rows: int, resumes: bool) -> WindowLog:
    """Return the log of a run.

    Args:
        resumes: whether the run has a checkpoint.

    Raises:
        UserError: the run resumes without its log, or with other options, or the log cannot be read.
    """
    path = folder / LOG
    if not path.exists():
        if resumes:
            raise UserError(
                f"data.stream_rows={rows}: the run has checkpoints, but no {path}, which names the version of the data "
                "set: remove data.stream_rows if the run has started without it, or choose another run directory"
            )
        return WindowLog(name, rows)
    try:
        found = WindowLog(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): choose another run directory") from error
    if (found.name, found.rows) != (name, rows):
        raise UserError(
            f"the run has started with data.train_files={found.name} data.stream_rows={found.rows}, and now it has "
            f"{name} and {rows}: set them back, or choose another run directory"
        )
    return found


class WindowReader:
    """Reads the windows of a data set, one at a time, in a process of its own, which goes on while the run trains.

    Args:
        folder: for the log and the rows. Rows that an earlier attempt has left there are removed.
        columns: those that are needed.

    Raises:
        RunError: the folder cannot be written.
    """

    def __init__(self, folder: Path, log: WindowLog, split: str, columns: Sequence[str]) -> None:
        self.log = log
        self._folder, self._split, self._columns = folder, split, tuple(columns)
        self._process: WorkerProcess | None = None
        self._window: int | None = None
        """The one that is being read, or has been."""
        self._is_there = False
        self._refusal: UserError | None = None
        self._failure = ""
        self._awaited: int | None = None
        self._heard_at, self._has_answered = 0.0, False
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._clear()

    def start(self, window: int) -> None:
        """Begin to read a window, unless it is being read or has been.

        Raises:
            ProcessLost: the process does not accept it.
        """
        if window == self._window and (self._is_there or self._refusal or (self._process and self._process.alive)):
            return
        if self._process is not None and not (self._is_there and self._process.alive):
            self.close()  # it reads another one, or has ended
        place = self.log.place(window)
        cursor = self.log.cursors[place] if place < len(self.log.cursors) else None
        self._window, self._is_there, self._refusal = window, False, None
        if self._process is None:
            self._process = WorkerProcess("hpc_rl.data.reading.stream", _SEND_S)
            cache = self._folder / ".cache"
            self._process.send(DataSet(self.log.name, self._split, self._columns, self.log.commit, cache))
        file = rows_file(self._folder, window)
        self._process.send(WindowRequest(file, place * self.log.rows, self.log.rows, cursor))

    def look(self, window: int) -> bool:
        """Wait up to a second for a window that is needed now; return whether it is there.

        Raises:
            UserError: the data set cannot be read.
            RunError: the hub has not answered for too long, or the process has ended.
        """
        if self._awaited != window:
            self._awaited, self._heard_at = window, time.monotonic()
            if self._refusal is not None:  # it was found while the run trained, and its reason may have gone
                print(f"warning: {self._refusal}; trying again", file=sys.stderr, flush=True)
                self._refusal = None
        try:
            self.start(window)
            if not self._is_there:
                self.listen(_POLL_S)
        except ProcessLost as error:
            raise RunError(f"the process that reads {self.log.name} {error}") from error
        if self._refusal is not None:
            raise self._refusal
        patience_s = PATIENCE_S if self._has_answered else FIRST_PATIENCE_S
        if not self._is_there and time.monotonic() - self._heard_at > patience_s:
            self.close()
            reason = self._failure or "it does not answer"
            raise RunError(
                f"{hub_address()} has sent no rows of {self.log.name} for {patience_s:.0f} s ({reason}): "
                "data.stream_rows needs internet on the first node of the job"
            )
        return self._is_there

    def listen(self, seconds: float = 0.0) -> None:
        """Take note of what the process reports.

        Args:
            seconds: how long to wait for the first report.

        Raises:
            ProcessLost: it has ended.
        """
        while self._process is not None and self._process.has_answer(seconds):
            seconds = 0.0
            try:
                found = self._process.receive(_SEND_S)
            except ProcessLost:
                self.close()
                raise
            if isinstance(found, HubFailed):
                self._failure = found.reason
                continue
            self._heard_at = time.monotonic()
            if isinstance(found, UserError):
                self._refusal = found
                self.close()
            elif isinstance(found, VersionKnown):
                self.log.commit, self._has_answered, self._failure = found.commit, True, ""
            elif isinstance(found, RowsArrived):
                self._failure = ""
            else:
                self._note(found)

    def close(self) -> None:
        """End the process, and remove the rows that it has written."""
        if self._process is not None:
            self._process.end()
            self._process = None
        self._is_there = False
        self._clear()
        remove_tree(self._folder / ".cache")

    def _clear(self) -> None:
        for path in self._folder.glob("rows-*"):
            path.unlink(missing_ok=True)

    def _note(self, written: WindowDone) -> None:
        assert self._window is not None
        self.log.note(self._window, written)
        try:
            with writing(self._folder / LOG):
                replace_synced(self._folder / LOG, json.dumps(asdict(self.log)))
            self._is_there = True
        except RunError as error:  # `look` raises it, where all ranks end together
            self._refusal = error
            self.close()


def rows_file(folder: Path, window: int) -> Path:
    """Return the file with the rows of a window until they are tokenized."""
    return folder / f"rows-{window:08d}.jsonl"


def window_blocks(path: Path, name: str, first: int, part: int, parts: int) -> Iterator[list[tuple[Row, str]]]:
    """Yield the blocks of rows of one part of a window; see `blocks` in sources.py.

    Args:
        name: of the data set, for the places.
        first: number of the window's first row in the data set, from 0.
    """
    rows = read_some(path, lambda row: row // BLOCK_ROWS % parts == part)
    places = ((row, f"{name}, row {number:,}") for number, row in enumerate(rows, start=first + 1) if row is not None)
    return chunks(places, BLOCK_ROWS)
