"""Training on a data set on the hub that is larger than the disk: one window of its rows after the other.

Rank 0 reads the rows of a window into a file of the run directory, all ranks tokenize them together, and the next
window is read while the run trains on this one. A window is what an epoch is for data that is here as a whole: its
number is the epoch of the position, its order follows from the seed and this number, and its last batch may be smaller.
A run whose window holds the whole data set therefore trains as if the data was not streamed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hpc_rl.data.identity import key_of, tokenizer_of, window_of, windows_of
from hpc_rl.data.lazy import sizes_of
from hpc_rl.data.order import Position, steps_per_epoch
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.row_checks import refuse_local, refuse_offline
from hpc_rl.data.reading.windows import WindowReader, read_log, rows_file, window_blocks
from hpc_rl.errors import AgreedError, AgreedRunError, RunError, UserError
from hpc_rl.finetune.training_data import GlobalBatch, TrainingData
from hpc_rl.formats.hub import data_offline
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir, trusted_group
from hpc_rl.system.worker_process import ProcessLost
from hpc_rl.token_cache.cache import forget, is_due, open_tokenized, stop
from hpc_rl.token_cache.entry import RowSource, TokenizeRequest
from hpc_rl.training.checkpoints import checkpoint
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.finetune.base import Objective

T = TypeVar("T")


class Windows(TrainingData):
    """A data set on the hub, window after window. Every rank has one; that of rank 0 reads.

    The window of the newest checkpoint is opened at once, so that a mistake in the data is found before the model is
    loaded.

    Args:
        root: folder for tokenized data.

    Raises:
        AgreedError: the data set cannot be streamed, or not by this run.
        Stopped: the run stops before the window is tokenized.
    """

    def __init__(
        self,
        objective: Objective,
        tokenizer: PreTrainedTokenizerBase,
        root: Path,
        run: RunDir,
        world: World,
        stopping: Stopping,
    ) -> None:
        super().__init__(objective.config)
        data = self._config.data
        assert data.stream_rows is not None
        (self._name,), self._rows = data.train_files, data.stream_rows
        self._objective, self._root, self._run, self._world, self._stopping = objective, root, run, world, stopping
        world.together(self._refuse_unreadable)
        self._tokenize = world.together(lambda: objective.tokenizer(tokenizer))
        self._window, self._place = -1, -1
        """The present window, and its number in its pass."""
        self._reader: WindowReader | None = None
        self._key: str = world.broadcast(windows_of(run.path))
        self._tokens, self._template = "", tokenizer.get_chat_template()
        """What the tokens depend on besides the rows: on rank 0, see `key_of`; and the template."""
        self.resume(*self._prepared(tokenizer))

    @property
    def total_steps(self) -> int:
        """The number of steps of the run, which is an option: the length of the data may not be known."""
        steps = self._config.trainer.total_training_steps
        assert steps is not None
        return steps

    def resume(self, position: Position, steps: int) -> None:
        """Continue after a position, and load its window. Every rank calls this."""
        self._position, self._left = position, steps
        if steps > 0:
            self.advance()

    @property
    def needs_more(self) -> bool:
        """Whether the next batch is in another window."""
        return self._position.epoch != self._window

    def advance(self) -> None:
        """Load the next window of which an item is left. Every rank calls this."""
        empty = 0
        while True:
            window = self._position.epoch
            contents, place, count = self._ask(partial(self._described, window))
            if count is not None and empty >= count:
                raise AgreedError(f"{self._name}: no row has a target token within data.max_length: raise it")
            if place != self._place:
                if self._place >= 0:  # otherwise the window may be on the disk since an earlier attempt
                    self._drop()
                self._load(window, place, contents)
            if len(self.items):
                break
            empty, self._position = empty + 1, Position(window + 1)
        self._window = window
        self._begin(self._position)
        self._read_ahead()

    def draw(self) -> GlobalBatch:
        """Return the next batch of the window."""
        if self._reader is not None:
            with contextlib.suppress(ProcessLost):  # another one reads the window when it is needed
                self._reader.listen()
        batch = super().draw()
        self._position, self._left = batch.position, self._left - 1
        return batch

    def samples(self, position: Position) -> int | None:
        """Return the number of items of the window; None at its beginning."""
        return len(self.items) if position.index and len(self.items) else None

    def progress(self, position: Position) -> dict[str, float]:
        """Return how many windows have been used, as metrics."""
        return {"train/window": position.epoch + position.index / len(self.items)}

    def close(self, is_done: bool) -> None:
        """End the process that reads; if the run is done, remove the present window. Every rank calls this."""
        if self._reader is not None:
            self._reader.close()
        if is_done:
            self._drop()

    def _refuse_unreadable(self) -> None:
        """Raise UserError if the data is not on the hub, or the hub is not asked."""
        refuse_local(self._name)
        variable = data_offline(os.environ)
        refuse_offline(self._name, f"{variable} is set" if variable else "")

    def _prepared(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Position, int]:
        """Prepare to read on rank 0. Return the position of the newest checkpoint, and the steps that are left."""
        config, run = self._config, self._run

        def prepare() -> list[int]:
            newest = checkpoint.expected(run.checkpoints)
            self._tokens = key_of([self._name], "train", config.data, tokenizer_of(tokenizer))
            log = read_log(run.stream, self._name, self._rows, resumes=newest is not None)
            self._reader = WindowReader(run.stream, log, "train", config.data.columns)
            return [0, 0, 0] if newest is None else [newest.epoch, newest.index, newest.step]

        epoch, index, step = self._world.broadcast(self._on_main(prepare))
        return Position(epoch, index), self.total_steps - step

    def _described(self, window: int) -> tuple[str, int, int | None] | None:
        """Return a text for the tokens of a window, its number in its pass, and the number of windows of a pass if
        it is known; None as long as the version of the data set is not known. Rank 0 calls this."""
        reader = self._reader
        assert reader is not None
        log = reader.log
        if log.commit is None:
            reader.look(window)
        if log.commit is None:
            return None
        place = log.place(window)
        rows = (place * self._rows, self._rows)
        return window_of(self._tokens, log.commit, rows, self._template), place, log.count

    def _load(self, window: int, place: int, contents: str) -> None:
        """Tokenize a window, unless it has been."""
        file, first = rows_file(self._run.stream, window), place * self._rows
        source = _Rows([self._name], "train", file, first, bring_rows=lambda: self._bring(window))
        request = TokenizeRequest(source, self._tokenize, self._objective.form, self._key, contents)
        group = trusted_group(self._run.path, self._config.slurm.group)
        rows, counts = open_tokenized(request, self._root, group, self._world, self._stopping)
        self.items, self._place = self._objective.items(rows), place
        self.sizes = sizes_of(self.items)
        if self._world.is_main:
            file.unlink(missing_ok=True)
            print(f"training data, window {window + 1}, from row {first + 1:,} of {self._name}: {counts}", flush=True)

    def _bring(self, window: int) -> None:
        """Wait until the rows of a window are there."""

        def look() -> bool | None:
            assert self._reader is not None
            return self._reader.look(window) or None

        self._ask(look)

    def _read_ahead(self) -> None:
        """Begin to read the next window, if the run needs it and it is another one."""
        left = steps_per_epoch(len(self.items) - self._position.index, self._config.data.train_batch_size)
        if self._reader is None or self._left <= left or self._reader.log.place(self._window + 1) == self._place:
            return
        with contextlib.suppress(ProcessLost):
            self._reader.start(self._window + 1)

    def _drop(self) -> None:
        """Remove the present window from memory and disk, and what killed attempts have left of other windows."""
        self.items, self.sizes, self._place = (), sizes_of(()), -1
        forget(self._key, self._root, self._world)

    def _ask(self, look: Callable[[], Any]) -> Any:
        """Return what rank 0 finds, as JSON returns it. Every rank calls this.

        Args:
            look: called on rank 0 until it returns something. It waits for up to a second.

        Raises:
            AgreedError: it has raised a UserError.
            Stopped: the run stops.
        """
        while True:
            found, stops = self._world.broadcast([self._on_main(look), is_due(self._world, self._stopping)])
            heart.beat()
            if found is not None:
                return found
            if stops:
                stop(self._stopping, self._world)

    def _on_main(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0, and return its result there. If it raises UserError, all ranks raise AgreedError."""
        found, failure = None, None
        if self._world.is_main:
            try:
                found = work()
            except UserError as error:
                failure = [str(error), isinstance(error, RunError)]
        failure = self._world.broadcast(failure)
        if failure is not None:
            raise (AgreedRunError if failure[1] else AgreedError)(failure[0])
        return found


@dataclass(frozen=True)
class _Rows(RowSource):
    """The rows of a window."""

    files: list[str]
    split: str
    path: Path
    """The file that rank 0 writes."""
    first: int
    """Number of the first row in the data set, from 0."""
    bring_rows: Callable[[], None]
    staleness: ClassVar[str] = "is of other rows or settings"

    def bring(self) -> None:
        """Write the file with the rows."""
        self.bring_rows()

    def blocks(self, part: int, parts: int) -> Iterator[list[tuple[Row, str]]]:
        """Yield one part of the rows, in blocks."""
        return window_blocks(self.path, self.files[0], self.first, part, parts)
