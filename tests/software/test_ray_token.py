from __future__ import annotations

import hashlib
from pathlib import Path

from hpc_rl.software.ray_token import digest_of, make_token


def test_a_token_replaces_an_earlier_file_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("earlier")
    file.chmod(0o644)
    first = make_token(file)
    assert file.read_bytes() == first and len(first) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert digest_of(file) == hashlib.sha256(first).hexdigest()
    assert make_token(file) != first and digest_of(tmp_path / "none") == ""
