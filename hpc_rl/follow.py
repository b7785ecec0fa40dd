"""Showing a log file while it grows."""

from __future__ import annotations

import codecs
from pathlib import Path


class Follower:
    """Reads what is new in a text file; the file may come later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        # A read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def new_text(self) -> str:
        """What was appended since the last call."""
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                new = log.read()
        except FileNotFoundError:
            return ""
        self._offset += len(new)
        return self._decoder.decode(new)
