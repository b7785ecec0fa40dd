"""What a fault did to a job: one row of the table in docs/reliability.md.

python -m tests.faults.outcomes FOLDER   # print the table
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """One fault in one job, as observed."""

    fault: str
    """What was done: `SIGSTOP of a rank`."""
    job: Literal["sft", "ppo", "submit"]
    detected_s: float | None
    """Seconds from the fault to the first message about it; None if the fault needs no message."""
    first_message: str
    """The first line that `hpc-rl explain` or the log shows about it."""
    ended: str
    """`resumed`, `exit code 1`, `unaffected` ..."""
    steps_lost: int | None
    """Steps that were repeated after the resume; None if the job did not resume."""
    left_behind: str
    """Files and processes that were still there after the end: `jobs.left_behind`. Empty if no job was to end."""
    losses_equal: bool | None = None
    """Whether the losses equal those of an uninterrupted run; None if not compared."""


_PATHS = re.compile(
    r" ?\(log in \S+\)|(; its log is|; the stacks of all processes are in| in file system) /\S+( and ends:)?"
)
"""Where the logs were, which the table leaves out."""
_FOLDER = re.compile(r"/(var/)?tmp/hpc-rl-[\w-]+(?=/)")
"""The folder of a test, which the table leaves out too."""
_ADVICE = re.compile(r" by a user or a program, or for lack of memory .*")
HEADINGS = ("fault", "job", "detected after", "first message", "then", "steps lost", "left behind", "losses equal")


def write(outcome: Outcome, folder: Path) -> None:
    """Add an outcome to a folder. Each is a file of its own, so that several processes may write."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{outcome.job} {outcome.fault}")
    (folder / f"{name}.json").write_text(json.dumps(asdict(outcome)))


def read(folder: Path) -> list[Outcome]:
    """Return the outcomes of a folder, ordered by fault and job."""
    found = [Outcome(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(found, key=lambda outcome: (outcome.fault.lower(), outcome.job))


def table(outcomes: Iterable[Outcome]) -> str:
    """Return outcomes as a Markdown table."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(_cells, outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    seconds, lost, equal = outcome.detected_s, outcome.steps_lost, outcome.losses_equal
    return (
        outcome.fault,
        outcome.job,
        "" if seconds is None else f"{seconds:.0f} s",
        _shown(outcome.first_message),
        outcome.ended,
        "" if lost is None else str(lost),
        outcome.left_behind,
        "" if equal is None else "yes" if equal else "NO",
    )


def _shown(message: str) -> str:
    for pattern, instead in ((_PATHS, ""), (_FOLDER, ""), (_ADVICE, " ...")):
        message = pattern.sub(instead, message)
    return message.removeprefix("hpc-rl: ").replace("|", "\\|")


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]))))
