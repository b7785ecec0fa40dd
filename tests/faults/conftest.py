"""The table of outcomes, printed at the end of the tests that injected faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.outcomes import Outcome, read, table, write

FOLDER = Path(os.environ.get("HPC_RL_FAULTS", "build/faults"))
_written: list[Outcome] = []


@pytest.fixture
def observed() -> Callable[[Outcome], None]:
    """Record what a fault did: one row of the table."""

    def record(outcome: Outcome) -> None:
        _written.append(outcome)
        write(outcome, FOLDER)

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of all outcomes so far, also those of earlier sessions."""
    if _written:
        terminalreporter.section("faults")
        terminalreporter.write_line(table(read(FOLDER)))
