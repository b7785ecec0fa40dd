"""A run's log and progress on the terminal while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console

from hpc_rl.follow import Follower
from hpc_rl.launch import runs
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import parse_line
from hpc_rl.tracking.progress import ProgressView


class RunView:
    """Prints what is new in a run's log, above a live progress bar where the output is a terminal.

    A context manager; call `poll` several times a second.
    """

    def __init__(self, run: RunDir, from_end: bool = False) -> None:
        self._run = run
        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._progress = ProgressView(self._console)
        self._log: Follower | None = None
        self._from_end = from_end
        self._metrics = Follower(run.metrics, _size(run.metrics))
        self._half_line = ""

    def __enter__(self) -> RunView:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.poll()
        if self._half_line:
            self._console.out(self._half_line)
        self._progress.__exit__(kind, error, traceback)

    def poll(self) -> None:
        """Show what came since the last call."""
        for line in self._new_lines():
            self._console.out(line)
        records = [record for text in self._metrics.new_text().splitlines() if (record := parse_line(text))]
        if records:
            self._progress.update(records[-1])

    def _new_lines(self) -> list[str]:
        if self._log is None:
            job_id = runs.current_job(self._run)
            if job_id is None:
                return []
            path = runs.job_log(self._run, job_id)
            self._log = Follower(path, _size(path) if self._from_end else 0)
        *lines, self._half_line = (self._half_line + self._log.new_text()).split("\n")
        return lines


def log_files(run: RunDir, node: int | None) -> list[Path]:
    """The log of the newest job, or all logs of one node in the newest attempt."""
    if node is None:
        job_id = runs.current_job(run)
        return [runs.job_log(run, job_id)] if job_id else []
    attempts = run.attempts()
    return sorted(attempts[-1].glob(f"node{node}[.-]*log")) if attempts else []


def follow_files(files: Callable[[], list[Path]], print_line: Callable[[Path, str], None]) -> Callable[[], None]:
    """A function that prints what is new in a set of files that may grow."""
    followers: dict[Path, Follower] = {}
    rests: dict[Path, str] = {}

    def poll() -> None:
        for path in files():
            follower = followers.setdefault(path, Follower(path))
            *lines, rests[path] = (rests.get(path, "") + follower.new_text()).split("\n")
            for line in lines:
                print_line(path, line)

    return poll


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
