from __future__ import annotations

from pathlib import Path

from hpc_rl.software.ray_token import make_token


def test_a_token_replaces_an_earlier_file_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("earlier")
    file.chmod(0o644)
    first = make_token(file)
    assert file.read_bytes() == first and len(first) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert make_token(file) != first
