"""A live progress bar for a run, on the terminal of the login node."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from hpc_rl.liveness.signs_of_life import end_signs_of_life
from hpc_rl.tracking.formatting import learning, rates
from hpc_rl.tracking.metrics import Record


class ProgressView:
    """A bar with the step and the latest numbers, below the log lines that are printed at the same time.

    A context manager. Does nothing if standard output is not a terminal.

        with ProgressView() as view:
            view.update(record)  # a record of metrics.jsonl
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console()
        self._progress = Progress(
            TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(bar_width=None), console=console, expand=True
        )
        self._task = self._progress.add_task("", total=None)
        self._live = Live(self._rows(""), console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            end_signs_of_life()
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, latest: Record) -> None:
        """Show a record of metrics.jsonl."""
        if self._live is not None:
            self._progress.update(self._task, completed=latest["step"], total=latest.get("total_steps"))
            self._live.update(self._rows(" · ".join([*learning(latest), *rates(latest)])))

    def wait(self, what: str) -> None:
        """Show what the run does before its first step."""
        if self._live is not None:
            self._live.update(self._rows(what))

    def _rows(self, numbers: str) -> Group:
        return Group(self._progress, Text(numbers, style="cyan"))
