"""A live view of a run on the terminal, redrawn every second until the run ends or the user leaves."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from hpc_rl.errors import UserError
from hpc_rl.formats.usage import read_spans
from hpc_rl.liveness.activity import hide_activity
from hpc_rl.liveness.shown_text import terminal
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.stages import start_phase
from hpc_rl.runs.status import status_of
from hpc_rl.system.files import Follower, read_end
from hpc_rl.tracking.dashboard import RunSnapshot, printable, screen
from hpc_rl.tracking.formatting import duration, hours
from hpc_rl.tracking.history import read_history
from hpc_rl.tracking.metrics import MOST_STEPS, Record, completed, parse_line, read_thinned
from hpc_rl.tracking.points import with_points
from hpc_rl.tracking.timeline import read_timeline

REFRESH_S = 1.0
ONCE_SIZE = (100, 36)
"""Columns and lines if the output is not a terminal."""
_LOG_BYTES = 32768
_MOST_LINES = 200


Explain = Callable[[RunDir], Sequence[str]]
"""Returns the lines that explain why a run failed; empty if it has not."""


def print_once(run: RunDir, explain: Explain) -> None:
    """Print the current state; as plain text if the output is not a terminal."""
    console = Console(highlight=False, file=terminal(sys.stdout))
    width, height = console.size if console.is_terminal else ONCE_SIZE
    if not console.is_terminal:
        console = Console(highlight=False, width=width, file=terminal(sys.stdout))
    console.print(screen(WatchedRun(run, explain).look(), width, height))


def watch(run: RunDir, explain: Explain) -> int:
    """Show the run until it ends, or until q or Ctrl-C.

    Returns:
        the run's exit code, or 0 if the user left.

    Raises:
        UserError: the output is not a terminal.
    """
    console = Console(highlight=False, file=terminal(sys.stdout))
    if not console.is_terminal or not sys.stdin.isatty():
        raise UserError(
            f"watch needs a terminal: use hpc-rl watch {run.name} --once for the current state, or "
            f"hpc-rl logs -f {run.name} for the log"
        )
    watched = WatchedRun(run, explain)
    code = 0
    hide_activity()

    def drawn() -> RenderableType:
        return screen(watched.look(), console.width, console.height)

    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(drawn(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while watched.active:
            if pressed(REFRESH_S) in ("q", "Q"):
                break
            live.update(drawn(), refresh=True)
        else:
            code = control.exit_code(watched.status)
    console.print(drawn())
    return code


class WatchedRun:
    """The state of a run, which is read repeatedly.

    Log and metrics are read at each look. Slurm is queried, and the files of all nodes are read, at growing intervals.
    """

    def __init__(self, run: RunDir, explain: Explain) -> None:
        self._run = run
        self._explain = explain
        self._records: list[Record] = read_thinned(run.metrics, MOST_STEPS).records
        self._metrics = Follower.at_end(run.metrics)
        self._interval = control.STATE_POLL_S[0]
        self._ending = control.EndDetector()
        self._ask()

    @property
    def active(self) -> bool:
        return not self._ended

    def look(self) -> RunSnapshot:
        if self.active and time.monotonic() >= self._asked + self._interval:
            self._interval = min(self._interval * 1.3, control.STATE_POLL_S[1])
            self._ask()
        self._read_metrics()
        phase = start_phase(self._run, self.status.state if self.status.active else "", self._run.attempts())
        if not phase and self.status.lends_to:
            phase = "it has no steps of its own"
        return RunSnapshot(
            name=printable(self._run.name),
            state=self.status.state,
            facts=[printable(fact) for fact in self._facts()],
            records=with_points(self._records, self._run.path),
            nodes=[replace(node, node=printable(node.node)) for node in self._nodes],
            lent_nodes=[replace(node, node=printable(node.node)) for node in self.status.lent_nodes],
            log=_last_lines(Path(self.status.log)) if self.status.log else (),
            timeline=read_timeline(self._run.timeline, self._records[-1]["step"] if self._records else 0),
            phase=printable(phase),
            explanation=self._explanation,
        )

    def _ask(self) -> None:
        attempts = self._run.attempts()
        self.status = status_of(self._run)
        self._ended = self._ending.seen(self.status, time.monotonic())
        self._history = read_history(self._run)
        self._nodes = read_spans(attempts[-1]) if attempts else []
        self._explanation = self._explain(self._run) if self._ended else ()
        self._asked = time.monotonic()

    def _facts(self) -> list[str]:
        now, attempts = self.status, self._history.attempts
        facts = [now.reason] if now.reason else []
        facts += [f"expected start {now.expected_start.replace('T', ' ')}"] if now.expected_start else []
        facts += [f"lends to {Path(now.lends_to).name}"] if now.lends_to else []
        facts += [f"job {now.job_id}"] if now.job_id else []
        facts += [now.nodes] if now.nodes else []
        facts += [f"exit code {now.exit_code}"] if now.exit_code else []
        if attempts and attempts[-1].began and attempts[-1].ended:
            end = time.time() if now.state == "RUNNING" else attempts[-1].ended
            facts += [f"attempt {attempts[-1].number}", duration(end - attempts[-1].began)]
            facts += [f"{hours(self._history.node_hours, self._history.lent_hours)} node hours"]
        return facts

    def _read_metrics(self) -> None:
        """Add new lines; a line of an earlier step discards all later steps, as in read_metrics."""
        for record in filter(None, map(parse_line, self._metrics.new_lines())):
            while self._records and self._records[-1]["step"] > record["step"]:
                self._records.pop()
            if self._records and self._records[-1]["step"] == record["step"]:
                record = {**self._records.pop(), **record}
            self._records.append(completed(record))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a pressed key; restore the terminal at the end (termios(3), cbreak)."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _last_lines(path: Path) -> list[str]:
    """Read the last lines of a log, however long it is."""
    text = read_end(path, _LOG_BYTES).decode(errors="replace").rstrip("\n")
    return text.split("\n")[-_MOST_LINES:] if text else []
