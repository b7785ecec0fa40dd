"""What is said about a process that a signal ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.system import deaths
from hpc_rl.system.deaths import meaning_of, ran_out_of_memory, remember_oom_kills


@pytest.mark.parametrize(
    ("code", "out_of_memory", "expected"),
    [
        (1, True, ""),
        (75, None, ""),
        (128, None, ""),
        (137, True, " (killed for lack of memory: use less)"),
        (
            137,
            False,
            " (killed (signal 9) by a user or a program, or for lack of memory (though the kernel counted no such kill "
            "in the job's cgroup); if it was memory, use less)",
        ),
        (139, True, " (signal 11, SIGSEGV)"),
        (143, None, " (signal 15, SIGTERM)"),
        (255, None, ""),
    ],
)
def test_the_meaning_of_an_exit_code(code: int, out_of_memory: bool | None, expected: str) -> None:
    assert meaning_of(code, out_of_memory, "use less") == expected


def test_without_a_counter_both_causes_are_possible() -> None:
    said = meaning_of(137, None, "use less")
    assert "killed (signal 9)" in said and "or for lack of memory (the kernel's counter is not readable here)" in said


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr(deaths, "own_cgroups", lambda: [tmp_path])
    yield tmp_path / "memory.events"


def test_only_kills_since_the_beginning_count(counter: Path) -> None:
    environ = {"HPC_RL_OOM_KILLS": "4"}  # of a job around this one
    counter.write_text("oom_kill 2\n")
    remember_oom_kills(environ)
    assert ran_out_of_memory(environ) is False
    counter.write_text("oom_kill 3\n")
    assert ran_out_of_memory(environ) is True
    assert ran_out_of_memory({}) is None


def test_a_machine_without_a_counter(counter: Path) -> None:
    environ = {"HPC_RL_OOM_KILLS": "4"}
    remember_oom_kills(environ)
    assert environ == {} and ran_out_of_memory(environ) is None
