"""An entry of tokenized data: a folder with Arrow files, data.json, which describes them, and checksums.json."""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import pyarrow as pa

from hpc_rl.data.identity import state_of
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.sources import blocks
from hpc_rl.data.tokenized import Form, Tokenize, Tokenized, Writer
from hpc_rl.errors import UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.system import entries
from hpc_rl.system.disk import UNWRITABLE, explained
from hpc_rl.system.files import write_synced
from hpc_rl.training.checkpoints import checksums

DESCRIPTION = entries.DESCRIPTION


class Unusable(Exception):
    """The files of an entry are missing or damaged, for the reason in the message."""


class RowSource(ABC):
    """Rows that are needed in tokenized form."""

    files: Sequence[str]
    """What the rows are from, for messages."""
    split: str
    staleness: ClassVar[str] = "is stale, because the data has changed"
    """What an entry of other contents shows, for messages."""

    def bring(self) -> None:  # noqa: B027 - may be left out
        """Make the rows readable. Every rank calls this before one of them reads rows."""

    @abstractmethod
    def blocks(self, part: int, parts: int) -> Iterator[list[tuple[Row, str]]]:
        """Yield the blocks of rows of one part; see `blocks` in hpc_rl/data/reading/sources.py."""

    def refuse_changed(self) -> None:  # noqa: B027 - may be left out
        """Raise UserError if the rows have changed since the request was made."""


@dataclass(frozen=True)
class Files(RowSource):
    """The rows of data files, or of data sets that `datasets` has stored."""

    files: Sequence[str]
    split: str
    state: str
    """Stands for the files as this rank sees them."""
    columns: Sequence[str] = ()
    """Columns of the files that are needed; empty: all."""

    def blocks(self, part: int, parts: int) -> Iterator[list[tuple[Row, str]]]:
        return blocks(self.files, self.split, part, parts, self.columns)

    def refuse_changed(self) -> None:
        if state_of(self.files) != self.state:
            raise UserError(
                f"{', '.join(self.files)}: changed while it was read; start the run again when the data is complete"
            )


@dataclass(frozen=True)
class TokenizeRequest:
    """Data that is needed in tokenized form."""

    source: RowSource
    tokenize: Tokenize
    form: Form[Any]
    key: str
    """Stands for the places of the rows, tokenizer, template and settings."""
    contents: str
    """Stands for the contents of the rows, as rank 0 sees them."""

    @property
    def name(self) -> str:
        """The name of the entry."""
        return f"{self.key}-{self.contents}"

    @property
    def what(self) -> str:
        """The data in messages."""
        return f"tokenized data of {', '.join(self.source.files)}"


class PartWriter:
    """What one rank writes of an entry: the blocks of rows whose numbers are part, part + parts, ..."""

    def __init__(self, request: TokenizeRequest, folder: Path, part: int, parts: int) -> None:
        self.is_done = False
        self._path = folder / f"part-{part:02d}-of-{parts:02d}.arrow"
        self._request = request
        self._counts = request.form.counts()
        self._blocks = request.source.blocks(part, parts)
        self._file: IO[bytes] | None = None
        self._stream: checksums.SummedStream | None = None
        self._writer: Writer[Any] | None = None

    def advance(self, seconds: float) -> str | None:
        """Tokenize for some time, at least one block, or nothing after the end of the data.

        Returns:
            why the file cannot be written, or None.

        Raises:
            UserError: a row is not valid.
        """
        if self.is_done:
            return None
        try:
            self._advance(time.monotonic() + seconds)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            return explained(error, self._path)
        return None

    def close(self) -> None:
        """Close the file. If not everything has been written, that is lost."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def summary(self) -> dict[str, Any]:
        """Return what the leader has to know, as JSON can write it."""
        assert self._stream is not None and self._writer is not None
        checksum = self._stream.checksum
        return {
            "file": self._path.name,
            "bytes": checksum.size,
            "crc32": checksum.crc32,
            "kept": self._writer.kept,
            "counts": asdict(self._counts),
        }

    def _advance(self, deadline: float) -> None:
        if self._writer is None or self._file is None:
            self._file = self._path.open("xb")
            self._stream = checksums.SummedStream(self._file)
            self._writer = Writer(self._stream, self._request.form)  # type: ignore[arg-type]
        for block in self._blocks:
            items, counts = self._request.tokenize(block)
            self._counts += counts
            self._writer.write([item for item in items if item is not None])
            if time.monotonic() >= deadline:
                return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.is_done = True


def complete(folder: Path, request: TokenizeRequest, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Write what describes the parts, and force all of it to the disk.

    Args:
        summaries: of the parts, in their order.

    Raises:
        OSError: a file cannot be written.
    """
    made = request.form.counts
    description = {
        "files": list(request.source.files),
        "split": request.source.split,
        "counts": asdict(sum((made(**one["counts"]) for one in summaries), made())),
        "parts": [one["file"] for one in summaries],
        "kept": [one["kept"] for one in summaries],
    }
    write_synced(folder / DESCRIPTION, json.dumps(description))
    sums = {one["file"]: checksums.Checksum(one["bytes"], one["crc32"]) for one in summaries}
    checksums.write(folder, {**sums, DESCRIPTION: checksums.of_file(folder / DESCRIPTION)})


def opened(request: TokenizeRequest, entry: Path, share: tuple[int, int] | None) -> tuple[Tokenized[Any], Any]:
    """Open the files of an entry. They are kept while the data is used.

    Args:
        share: (number of this rank, number of ranks), of which each reads a part of the files to compare checksums.
            None for files that have just been written.

    Raises:
        Unusable: files are missing or damaged.
        UserError: they are intact, and cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        held = entries.hold(entry)
        if held is None:
            raise Unusable(f"{entries.LOCK} is missing")
        stack.callback(held.close)
        if share is not None and (damage := _damage_of(entry, *share)) is not None:
            raise Unusable(damage)
        try:
            found = json.loads((entry / DESCRIPTION).read_text())
            paths = [entry / name for name in found["parts"]]
            counts = request.form.counts(**found["counts"])
            tokenized = request.form.opened(paths, found["kept"], held)
        except FileNotFoundError as error:  # another run has just removed the name
            raise Unusable(str(error)) from error
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            raise UserError(cannot_read(request, entry, str(error))) from error
        entries.note_use(entry)
        stack.pop_all()
        return tokenized, counts


def cannot_read(request: TokenizeRequest, entry: Path, reason: str) -> str:
    """Return the message about an entry that is of no use."""
    return f"{request.what} in {entry} cannot be read ({reason}): delete this folder if it exists, and start again"


def _damage_of(entry: Path, rank: int, ranks: int) -> str | None:
    """Return what is wrong with the names and sizes of an entry's files, or with the contents of this rank's share."""
    try:
        sums = checksums.read(entry)
    except (OSError, ValueError) as error:
        return f"{checksums.NAME}: {error}"
    if not sums or DESCRIPTION not in sums:
        return f"{checksums.NAME} is missing" if sums is None else f"{checksums.NAME} is not valid"
    return checksums.wrong_size(entry, sums) or checksums.wrong_contents(
        entry, sums, sorted(sums)[rank::ranks], heart.beat
    )
