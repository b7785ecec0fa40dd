"""A run's log and progress on the terminal while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from hpc_rl.liveness.activity import hide_activity
from hpc_rl.liveness.shown_text import shown, terminal
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.stages import Stages
from hpc_rl.runs.status import current_job, job_log
from hpc_rl.system.files import Follower
from hpc_rl.tracking.formatting import learning, rates
from hpc_rl.tracking.metrics import Record, parse_line

MOST_LOG_BYTES = 2**26
"""At the end of a log that are shown."""


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
            hide_activity()
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


class RunView:
    """Print new lines of a run's log, above a live progress bar if the output is a terminal.

    Before the first step, the bar shows the stage of the run. Without a terminal, `note` receives it.

    A context manager; call `poll` several times a second.

    Args:
        state: of the run, if `saw` is not called.
    """

    def __init__(self, run: RunDir, note: Callable[[str], None], state: str = "") -> None:
        self._run = run
        self._stages = Stages(run, note, state)
        self.saw = self._stages.saw
        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, file=terminal(sys.stdout))
        self._progress = ProgressView(self._console)
        self._log: Follower | None = None
        self._metrics = Follower.at_end(run.metrics)
        self._latest: Record = {}

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show_lines()  # no stage, whose line would follow the message that the job goes on
        if self._log is not None and self._log.rest:
            self._console.out(shown(self._log.rest))
        self._progress.__exit__(kind, error, traceback)

    def poll(self) -> None:
        """Show what is new since the last call."""
        self._show_lines()
        records = [record for text in self._metrics.new_lines() if (record := parse_line(text))]
        for record in records:  # a step may have several
            self._latest = {**self._latest, **record} if self._latest.get("step") == record["step"] else record
        if records:
            self._progress.update(self._latest)
        elif not self._console.is_terminal:
            self._stages.poll()
        elif stage := self._stages.text():
            self._progress.wait(stage)

    def _show_lines(self) -> None:
        for line in self._new_lines():
            self._console.out(shown(line))

    def _new_lines(self) -> list[str]:
        if self._log is None:
            job_id = current_job(self._run)
            if job_id is None:
                return []
            self._log = Follower(job_log(self._run, job_id))
        return self._log.new_lines()


def log_files(run: RunDir, node: int | None) -> list[Path]:
    """Return the log of the newest job, or all logs of one node in the newest attempt."""
    if node is None:
        job_id = current_job(run)
        log = job_log(run, job_id) if job_id else None
        return [log] if log and log.exists() else []
    attempts = run.attempts()
    return sorted(attempts[-1].glob(f"node{node}[.-]*log")) if attempts else []


class LogFiles:
    """Print new lines of a set of files that may grow; of very large ones, only the end. A context manager."""

    def __init__(self, files: Callable[[], list[Path]], print_line: Callable[[Path, str], None]) -> None:
        self._files = files
        self._print_line = print_line
        self._followers: dict[Path, Follower] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for path, follower in self._followers.items():
            if follower.rest:
                self._print_line(path, follower.rest)

    def poll(self) -> None:
        """Print the lines that were completed since the last call."""
        for path in self._files():
            if path not in self._followers:
                self._followers[path] = Follower.at_end(path, MOST_LOG_BYTES)
            while lines := self._followers[path].new_lines():
                for line in lines:
                    self._print_line(path, line)
