"""The lines of slurm.setup as statements of bash, each of which the job script can check."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache

BASH_TIMEOUT_S = 20


@cache
def statements(lines: tuple[str, ...]) -> list[str]:
    """Return complete statements: lines that bash can read alone, or several that belong together, such as a loop.

    `a && b; c` becomes two, because the exit code of the first would be lost. The last statement is incomplete if the
    lines are.
    """
    found: list[str] = []
    pending: list[str] = []
    for line in "\n".join(lines).split("\n"):
        pending.append(line)
        text = "\n".join(pending)
        if is_complete(text):
            found += _parts(text) if "\n" not in text.strip() else [text]
            pending = []
    if pending:
        found.append("\n".join(pending))
    return [one for one in found if one.strip()]


def bash_errors(lines: Sequence[str]) -> list[str]:
    """Return what bash reports about the syntax of these lines."""
    text = "\n".join(lines)
    # Bash warns of a locale that this machine lacks, and reads the file in BASH_ENV: neither is about these lines.
    environ = {**{name: value for name, value in os.environ.items() if name != "BASH_ENV"}, "LC_ALL": "C"}
    done = subprocess.run(
        ["/bin/bash", "-n", "-c", text],
        env=environ,
        capture_output=True,
        text=True,
        timeout=BASH_TIMEOUT_S,
        check=False,
    )
    return done.stderr.strip().splitlines()


def is_complete(text: str) -> bool:
    """Return whether bash needs no further line: no open quote, compound command, here-document or backslash."""
    backslashes = len(text) - len(text.rstrip("\\"))
    return backslashes % 2 == 0 and not bash_errors([text])


def _parts(line: str) -> Iterator[str]:
    """Yield the statements of one line, which semicolons separate. A comment could contain any; it stays whole."""
    start = 0
    if not re.search(r"(^|\s)#", line):
        for match in re.finditer(";", line):
            head, tail = line[start : match.start()], line[match.end() :]
            if head.strip() and tail.strip() and is_complete(head) and is_complete(tail):
                yield head.strip()
                start = match.end()
    yield line[start:].strip()
