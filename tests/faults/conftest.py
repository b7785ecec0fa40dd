"""The outcomes of the faults that tests injected, printed as a table at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.outcomes import Outcome, table, write

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
    """Print the outcomes of this session. `.ci/test-faults` prints those of all of its parts as one table."""
    if _written:
        terminalreporter.section("faults")
        terminalreporter.write_line(table(_written))
