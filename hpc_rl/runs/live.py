"""A run on the terminal, looked at again every second until it ends or the user has seen enough."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from hpc_rl.errors import UserError
from hpc_rl.host.files import Follower
from hpc_rl.host.usage import read_spans
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.status import status_of
from hpc_rl.tracking.dashboard import Snapshot, screen
from hpc_rl.tracking.formatting import duration, hours
from hpc_rl.tracking.history import read_history
from hpc_rl.tracking.metrics import Record, parse_line, read_metrics

REFRESH_S = 1.0
ONCE_SIZE = (100, 36)
"""Columns and lines where the output is no terminal."""
_LOG_BYTES = 32768
_MOST_LINES = 200


def print_once(run: RunDir) -> None:
    """Print what there is to see now; on no terminal, as plain text."""
    console = Console(highlight=False)
    width, height = console.size if console.is_terminal else ONCE_SIZE
    if not console.is_terminal:
        console = Console(highlight=False, width=width)
    console.print(screen(Watched(run).look(), width, height))


def watch(run: RunDir) -> int:
    """Show the run until it ends, or until q or Ctrl-C; the run's exit code, or 0 where the user left.

    Raises:
        UserError: there is no terminal to show it on.
    """
    console = Console(highlight=False)
    if not console.is_terminal or not sys.stdin.isatty():
        raise UserError(
            f"watch needs a terminal: hpc-rl watch {run.name} --once prints one picture, "
            f"hpc-rl logs -f {run.name} follows the log"
        )
    watched = Watched(run)
    code = 0

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


class Watched:
    """What is known of a run. Log and metrics are read again at each look; Slurm is asked, and every node's file read,
    less and less often."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._records: list[Record] = read_metrics(run.metrics)
        self._metrics = Follower(run.metrics, _size(run.metrics))
        self._rest = ""
        self._interval = control.STATE_POLL_S[0]
        self._ask()

    @property
    def active(self) -> bool:
        return self.status.active

    def look(self) -> Snapshot:
        if self.active and time.monotonic() >= self._asked + self._interval:
            self._interval = min(self._interval * 1.3, control.STATE_POLL_S[1])
            self._ask()
        self._read_metrics()
        return Snapshot(
            name=self._run.name,
            state=self.status.state,
            facts=self._facts(),
            records=self._records,
            nodes=self._nodes,
            log=_last_lines(Path(self.status.log)) if self.status.log else (),
        )

    def _ask(self) -> None:
        attempts = self._run.attempts()
        self.status = status_of(self._run)
        self._history = read_history(self._run)
        self._nodes = read_spans(attempts[-1]) if attempts else []
        self._asked = time.monotonic()

    def _facts(self) -> list[str]:
        now, attempts = self.status, self._history.attempts
        facts = [now.reason] if now.reason else []
        facts += [f"job {now.job_id}"] if now.job_id else []
        facts += [now.nodes] if now.nodes else []
        facts += [f"exit code {now.exit_code}"] if now.exit_code else []
        if attempts and attempts[-1].began and attempts[-1].ended:
            end = time.time() if now.state == "RUNNING" else attempts[-1].ended
            facts += [f"attempt {attempts[-1].number}", duration(end - attempts[-1].began)]
            facts += [f"{hours(self._history.node_hours)} node hours"]
        return facts

    def _read_metrics(self) -> None:
        """New lines; one of an earlier step takes back all from there on, as in read_metrics."""
        *lines, self._rest = (self._rest + self._metrics.new_text()).split("\n")
        for record in filter(None, map(parse_line, lines)):
            while self._records and self._records[-1]["step"] > record["step"]:
                self._records.pop()
            if self._records and self._records[-1]["step"] == record["step"]:
                record = {**self._records.pop(), **record}
            self._records.append(record)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys one by one, as they are pressed; the terminal is as before at the end (termios(3), cbreak)."""
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
    """The end of a log; of a large one no more is read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return log.read().decode(errors="replace").rstrip("\n").split("\n")[-_MOST_LINES:]
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
