"""What an adapter is: how a program of the user is recognised, asked to save, resumed, and read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint, newest_saved
from hpc_rl.run_dir import RunDir


@dataclass(frozen=True)
class ProgramPlace:
    """The job in which a program runs."""

    run: RunDir
    nodes: int = 1
    processes: int = 1
    """Of each node: one for each GPU."""
    seconds: float | None = None
    """From now until the program should have saved, with slurm.warning_s left; None if there is no limit."""
    is_later: bool = False
    """Whether an earlier attempt of the run may have saved."""
    began: float = 0.0
    """Unix time of the run's first attempt: what was written before it belongs to another run."""

    @property
    def saved_path(self) -> str | None:
        """The last checkpoint of earlier attempts that a hook in the program has recorded."""
        found = newest_saved(self.run) if self.is_later else None
        return found.path if found else None

    def after_attempts(self, before: str | None = None) -> ProgramPlace:
        """Return the place with what is known of the run's attempts so far.

        Args:
            before: name of the folder of the present attempt; None if it has not begun.
        """
        first = self.run.path / "attempt-1"
        # By the clock of the file system, which may differ from that of the node.
        times = [path.stat().st_mtime for path in (first, *first.iterdir())] if first.is_dir() else [time.time()]
        return replace(self, is_later=first.is_dir() and before != first.name, began=min(times))


@dataclass(frozen=True)
class ReportedStep:
    """A step that the output of a program reports."""

    step: int
    """0 for a line that tells only the total."""
    total: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Under our names (hpc_rl/tracking/metrics.py)."""


def _none(_program: Program, _place: ProgramPlace) -> list[str]:
    return []


def _no_variables(_program: Program, _place: ProgramPlace) -> dict[str, str]:
    return {}


def _no_output(_program: Program) -> str | None:
    return None


def _no_checkpoint(_program: Program, _place: ProgramPlace) -> Checkpoint | None:
    return None


def _no_progress(_line: str) -> ReportedStep | None:
    return None


@dataclass(frozen=True)
class Adapter:
    """One row of ADAPTERS."""

    name: str
    title: str
    """The program in messages."""
    kinds: tuple[Literal["torchrun", "ray"], ...]
    """Kinds of jobs that start it."""
    packages: tuple[str, ...] = ()
    """What the job's Python has to have; of several, those that the program uses."""
    recognises: Callable[[Program], bool] = lambda program: False
    """Returns whether a program is this one."""
    command: Callable[[Program], Sequence[str]] = lambda program: program.words
    """Returns what the ranks or the driver run: without the program's own launcher, if it has one."""
    saves: str = ""
    """How it saves when the run has to stop, for messages: it follows `saves to FOLDER`."""
    hook: str = ""
    """Row of HOOKS (hpc_rl/adapters/inside/hooks.py) that changes the program from inside; empty for none."""
    saves_when_asked: bool = False
    """Whether it saves at the end of its step when it is asked to stop; otherwise at its own times only."""
    ends_itself: bool = False
    """Whether it ends by itself, or may do so, when it has saved because it was asked to."""
    has_heartbeats: bool = False
    """Whether its hook records heartbeats, by which hangs are found."""
    output: Callable[[Program], str | None] = _no_output
    """Returns the folder of its checkpoints, as typed."""
    arguments: Callable[[Program, ProgramPlace], Sequence[str]] = _none
    """Returns what is added to the command of an attempt."""
    environment: Callable[[Program, ProgramPlace], Mapping[str, str]] = _no_variables
    """Returns variables that the program needs."""
    conflicts: Callable[[Program, ProgramPlace], Sequence[str]] = _none
    """Returns sentences about options that contradict the job."""
    newest: Callable[[Program, ProgramPlace], Checkpoint | None] = _no_checkpoint
    """Returns its last complete checkpoint. When the run has to stop, the program ends after its next one."""
    progress: Callable[[str], ReportedStep | None] = _no_progress
    """Reads a line of its log."""
    stops: Callable[[str], bool] = lambda line: False
    """Returns whether a line of its log tells that it saves, or has saved, because its own limit of time is near."""

    def folder(self, program: Program) -> Path | None:
        """Return the folder of its checkpoints."""
        found = self.output(program)
        return program.folder / found if found else None

    def needs(self, program: Program) -> list[str]:
        """Return the packages that the job's Python has to have for a program."""
        return [name for name in self.packages if len(self.packages) == 1 or program.uses(name)]
