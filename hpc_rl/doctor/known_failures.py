"""The table of known failures, known_failures.toml, and its section of the documentation.

    python -m hpc_rl.doctor.known_failures docs/troubleshooting.md

This writes the section "Known failures" of the page; everything above it is written by hand.
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


@dataclass(frozen=True)
class KnownFailure:
    """One entry of known_failures.toml, which explains the fields."""

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


def _read(path: Path) -> tuple[KnownFailure, ...]:
    table = tomllib.loads(path.read_text())
    return tuple(
        KnownFailure(kind=kind, **{**entry, "patterns": tuple(entry.get("patterns", ()))})
        for kind in get_args(Kind)
        for entry in table[kind]
    )


KNOWN_FAILURES = _read(Path(__file__).with_suffix(".toml"))
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
