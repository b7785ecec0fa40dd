"""A live progress bar of a run on the login node's terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hpc_rl.tracking.metrics import Record
from hpc_rl.tracking.text import losses, rates


class ProgressView:
    """Bar, step and latest numbers of a run below the log lines that are printed meanwhile.

    A context manager. Does nothing where standard output is no terminal.

        with ProgressView() as view:
            view.update(record)  # a record of metrics.jsonl
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=None, numbers="waiting for the first step")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def update(self, latest: Record) -> None:
        """Show a record of metrics.jsonl."""
        numbers = " · ".join([*losses(latest), *rates(latest)])
        self._progress.update(
            self._task, completed=latest["step"], total=latest["total_steps"], numbers=numbers, refresh=False
        )
