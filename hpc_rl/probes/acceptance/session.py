"""A session: processes that run checks one after another, until one of them crashes or hangs.

The node's entry then starts another session, which begins with the next check.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.formats.acceptance import Launcher, Line, append, read, unfinished
from hpc_rl.probes.acceptance.bench import Layout, Skip
from hpc_rl.probes.acceptance.table import CheckRow, rows


@dataclass(frozen=True)
class CheckSession:
    """The checks of one launcher that are left."""

    layout: Layout
    results: Path
    folder: Path
    """Of this session, for logs and run directories; all nodes share it."""

    def plan(self) -> None:
        """Write the lines of all checks that no earlier session has planned."""
        known = {line.name for line in read(self.results)}
        append(self.results, [row.line() for row in rows(self.layout) if row.name not in known])

    def left(self, launcher: Launcher) -> list[CheckRow]:
        """Return the rows that have not ended."""
        names = {line.name for line in unfinished(read(self.results), launcher)}
        return [row for row in rows(self.layout) if row.name in names]

    def begin(self, row: CheckRow) -> None:
        """Write that a check has started."""
        self._write(Line(**{**row.line().__dict__, "state": "started"}))

    def end(self, row: CheckRow, outcome: tuple[str, str], seconds: float) -> None:
        """Write how a check ended."""
        state, found = outcome
        self._write(row.line().ended(state, found, seconds))  # type: ignore[arg-type]

    def blocked(self, row: CheckRow) -> str | None:
        """Return why a check cannot run after what has failed, or None."""
        states = {line.name: line.state for line in read(self.results)}
        return f"needs the check {row.after!r}, which failed" if states.get(row.after) == "failed" else None

    def _write(self, line: Line) -> None:
        append(self.results, [line])


def parse(argv: Sequence[str]) -> CheckSession:
    """Read the command line that `hpc_rl.node.health.train` writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(argv)
    layout = Layout.here(options.device, options.nodes, options.processes)
    return CheckSession(layout, options.results, options.folder)


def function_of(row: CheckRow) -> Callable[..., str]:
    """Return the function of a row."""
    module, _, name = row.case.function.partition(":")
    found: Callable[..., str] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


def attempt(check: Callable[[], str]) -> tuple[str, str]:
    """Run a check and return its state and its words. Errors that are no UserError are raised."""
    try:
        return "passed", check()
    except Skip as reason:
        return "skipped", str(reason)
    except UserError as error:
        return "failed", str(error)


def words_of(error: BaseException) -> str:
    """Return type and message of an error in one line; Ray wraps the errors of actors."""
    cause = getattr(error, "cause", None)
    inner: Any = cause if isinstance(cause, BaseException) else error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


def error_file(folder: Path) -> Path:
    """Return the file in which this rank writes why it ended."""
    return folder / f"rank{os.environ.get('RANK', '0')}.error"
