"""The table of known failures, failures/*.toml, and its section of the documentation.

    python -m hpc_rl.doctor.known_failures docs/troubleshooting.md

This writes the section "Known failures" of the page; everything above it is written by hand.

Each entry has the messages that show a failure, its cause, and what to do:

    [[outside]]      what Slurm, the kernel or Ray did to the job
    [[cause]]        what went wrong in the job
    [[death]]        a process that ended without a message of its own
    [[exception]]    any other exception
    [[consequence]]  what processes report when another one has failed; shown only after the causes

Within a kind, the earlier entry is shown first, in the order of FILES: what is specific comes before what is general. A
pattern is a part of one line, or its beginning after ^; * stands for anything. `over` applies to a number that follows
the pattern: only a larger one is a failure. `messages` are examples, one per line.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["outside", "cause", "death", "exception", "consequence"]
HEADING = "## Known failures\n"
FILES = ("launch", "containers", "gpus", "network", "packages", "ray", "programs", "models", "job", "files", "general")


@dataclass(frozen=True)
class KnownFailure:
    """One entry of the table."""

    kind: Kind
    title: str
    messages: str
    cause: str
    fix: str
    patterns: tuple[str, ...] = ()
    over: float | None = None

    @property
    def anchor(self) -> str:
        """Return the fragment of the page's address that GitHub derives from the title."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


def _read(folder: Path) -> tuple[KnownFailure, ...]:
    tables = [tomllib.loads((folder / f"{name}.toml").read_text()) for name in FILES]
    return tuple(
        KnownFailure(kind=kind, **{**entry, "patterns": tuple(entry.get("patterns", ()))})
        for kind in get_args(Kind)
        for table in tables
        for entry in table.get(kind, ())
    )


KNOWN_FAILURES = _read(Path(__file__).with_name("failures"))
(ANY_EXCEPTION,) = (failure for failure in KNOWN_FAILURES if failure.kind == "exception")


def page(text: str) -> str:
    """Return the text of docs/troubleshooting.md with a new section of known failures."""
    return text.partition(HEADING)[0] + HEADING + "".join(map(_section, KNOWN_FAILURES))


def _section(failure: KnownFailure) -> str:
    messages = failure.messages.strip("\n")
    return f"\n### {failure.title}\n\n```\n{messages}\n```\n\n**Cause.** {failure.cause}\n\n**Fix.** {failure.fix}\n"


if __name__ == "__main__":
    guide = Path(sys.argv[1])
    guide.write_text(page(guide.read_text()))
