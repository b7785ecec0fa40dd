"""Text of others on a terminal, which obeys control characters: they fill the clipboard, hide text, rename windows.

Logs, names of nodes, columns and runs, and answers of models may contain them. Commands print through `escaped_output`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

from hpc_rl.liveness.activity import printed

_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters other than tabulators and ends of lines, and those that change the direction of writing."""
_HOLE = re.compile("\0{9,}")
"""Zeros where a file has a hole."""


def shown(text: str) -> str:
    """Return a text without colours, and with other control characters in the notation of Python. Of a line that a
    progress bar has overwritten, the last version is left."""
    if _CONTROL.search(text) is None:
        return text
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    text = _HOLE.sub(lambda zeros: f"\\x00 ({len(zeros[0]):,} times)", _COLOUR.sub("", text))
    return _CONTROL.sub(lambda found: _named(found[0]), text)


def _named(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


class EscapedStream:
    """A text stream that shows control characters; see `shown`."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        printed()
        self.stream.write(shown(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Let `print` show control characters, in the standard output and in the messages."""
    out, messages = (cast(IO[str], EscapedStream(terminal(stream))) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(messages):
        yield


def terminal(stream: IO[str]) -> IO[str]:
    """Return the stream below an EscapedStream, for screens that are made of control sequences."""
    return stream.stream if isinstance(stream, EscapedStream) else stream
