"""The token that protects a Ray cluster. Without one, anybody who reaches its ports runs code as this user."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

TOKEN = ".ray-token"
"""Name of the file in an attempt's folder. The job script removes it at the end of the job."""


def make_token(path: Path) -> bytes:
    """Write a new token to a file that only its owner can read, and return it."""
    token = secrets.token_hex(32).encode()
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(token)
    return token


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a token, which tells nothing of it; an empty text if there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
