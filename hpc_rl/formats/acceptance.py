"""The results of `hpc-rl doctor --train`: one file of JSON lines, which grows while the job runs.

The processes of a check write a line when they plan it, when they start it and when it has ended. If they die, the
node's entry writes the last line for them. The last line of a check counts, so the file is complete at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from hpc_rl.system.files import open_to_append
from hpc_rl.system.scratch import local_folder, new_name

State = Literal["planned", "started", "passed", "skipped", "failed"]
Launcher = Literal["torchrun", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "ray")
"""The node entries that start the checks' processes, in the order in which they are used."""
RESULTS = "results.jsonl"
FOLDER = "train"
"""Folder in the attempt's folder."""
ENV_SCRATCH = "HPC_RL_TRAIN_SCRATCH"
"""The folder on the nodes' own disks in which the job creates its model and data."""
WORDS = 600
"""Most characters of a message that are kept."""


@dataclass(frozen=True)
class Line:
    """The state of one check."""

    name: str
    launcher: Launcher
    state: State
    meaning: str = ""
    """What a failure means."""
    setting: str = ""
    """The setting that avoids the problem."""
    found: str = ""
    """What was measured, the reason why it was skipped, or the error."""
    covers: tuple[str, ...] = ()
    """The layouts that the check covers if it passes, in words (`hpc_rl.formats.layouts.Covered`)."""
    deadline_s: float = 0.0
    """Seconds after its start in which the check has to end."""
    seconds: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.state in ("passed", "skipped", "failed")

    def ended(self, state: State, found: str, seconds: float = 0.0) -> Line:
        """Return the line of the check's end."""
        return replace(self, state=state, found=" ".join(found.split())[:WORDS], seconds=round(seconds, 1))


def results_file(attempt_dir: Path) -> Path:
    """Return the path of the results of an attempt."""
    return attempt_dir / FOLDER / RESULTS


def scratch_folder(environ: Mapping[str, str], job_id: str) -> Path:
    """Return a new name for the folder of a job's model and data on a machine's own disk."""
    return local_folder(environ) / new_name(job_id)


def append(path: Path, lines: Sequence[Line]) -> None:
    """Append lines, and have them on the disk before returning."""
    with open_to_append(path) as file:
        file.writelines(json.dumps(asdict(line)).encode() + b"\n" for line in lines)
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """Return the newest line of each check, in the order in which they were planned.

    A last line that was cut off is left out. Without a file there are no lines.
    """
    found: dict[str, Line] = {}
    for line in _lines(path):
        found[line.name] = line
    return list(found.values())


def unfinished(lines: Sequence[Line], launcher: Launcher) -> list[Line]:
    """Return the checks of a launcher that have not ended."""
    return [line for line in lines if line.launcher == launcher and not line.has_ended]


def _lines(path: Path) -> Iterator[Line]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for number, row in enumerate(rows := text.splitlines(), start=1):
        try:
            fields = json.loads(row)
            yield Line(**{**fields, "covers": tuple(fields.get("covers", ()))})
        except (ValueError, TypeError):
            if number < len(rows):
                raise
