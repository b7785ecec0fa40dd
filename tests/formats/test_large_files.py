"""Files that were not copied completely, made from small whole ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpc_rl.errors import UserError
from hpc_rl.formats.large_files import check_large_file, check_model_folder, check_parquet, refuse_pointer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"


def error_of(path: Path, check: Any = check_large_file) -> str:
    with pytest.raises(UserError) as caught:
        check(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def weights(path: Path, **metadata: str) -> Path:
    save_file({"a": torch.ones(3, 5), "b": torch.ones(2, dtype=torch.bfloat16)}, path, metadata or None)
    return path


def header(entries: Any, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_whole_files_pass(tmp_path: Path) -> None:
    check_large_file(weights(tmp_path / "model.safetensors"))
    check_large_file(weights(tmp_path / "noted.safetensors", format="pt"))
    torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")
    check_large_file(tmp_path / "model.bin")
    torch.save({"a": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    check_large_file(tmp_path / "old.bin")
    (tmp_path / "config.json").write_text("{}")
    check_model_folder(tmp_path)
    (tmp_path / "none.safetensors").write_bytes(header({}))
    check_large_file(tmp_path / "none.safetensors")


@pytest.mark.parametrize("left", [1, 30, 4, 8, 9, -1, -40])
def test_truncated_safetensors(tmp_path: Path, left: int) -> None:
    """`left` bytes are kept, or cut off if it is negative."""
    path = weights(tmp_path / "model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    text = error_of(path)
    assert ("is truncated" if left >= 8 or left < 0 else "is not a safetensors file") in text
    if left < 0:
        assert f"it has {len(whole) + left:,} of {len(whole):,} bytes" in text


def test_the_header_is_compared_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entries = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"x": "y"}}
    path.write_bytes(header(entries, b"1234"))
    check_large_file(path)
    path.write_bytes(header(entries, b"123"))
    assert "is truncated" in error_of(path)
    path.write_bytes(header(entries, b"12345"))
    assert "is damaged" in error_of(path)


@pytest.mark.parametrize(
    "contents",
    [
        header([1, 2]),
        header({"a": {"dtype": "F32"}}),
        header({"a": {"data_offsets": [4, 0]}}),
        header({"a": {"data_offsets": [-1, 4]}}, b"1234"),
        header({"a": {"data_offsets": "04"}}),
        struct.pack("<Q", 5) + b"{abc}",
        struct.pack("<Q", 3) + b"\xff\xff\xff",
        struct.pack("<Q", 2**60) + b"{}",
        b"<html><body>404",
    ],
)
def test_other_contents_in_a_safetensors_file(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    assert "is not a safetensors file: its header cannot be read" in error_of(path)


def test_truncated_torch_file(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(300)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "is truncated: the directory at the end of the file is missing" in error_of(path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "pytorch_model.bin", "tokenizer.model"])
def test_git_lfs_pointers(tmp_path: Path, name: str) -> None:
    weights(tmp_path / "whole.safetensors")
    (tmp_path / name).write_bytes(POINTER)
    for check, path in ((check_large_file, tmp_path / name), (refuse_pointer, tmp_path / name)):
        assert f"run `git lfs pull` in {tmp_path}" in error_of(path, check)
    with pytest.raises(UserError, match=f"{name} is a git-lfs pointer"):
        check_model_folder(tmp_path)


def test_empty_files_and_files_that_no_model_needs(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is empty: copy or download it again" in error_of(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "training_args.pt").touch()
    (tmp_path / "link.bin").symlink_to(tmp_path / "gone")
    check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"PAR1" + bytes(4) + b"PAR1", None),
        (b"PAR1" + bytes(3) + b"PAR1", "is truncated"),
        (b"PAR1" + bytes(20), "is truncated: it does not end with PAR1"),
        (b"", "is not a parquet file"),
        (b"PK12" + bytes(20) + b"PAR1", "is not a parquet file: it does not start with PAR1"),
        (b"PARE" + bytes(20) + b"PARE", "is an encrypted parquet file"),
    ],
)
def test_parquet(tmp_path: Path, contents: bytes, message: str | None) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(contents)
    if message is None:
        check_parquet(path)
        check_large_file(path)
    else:
        assert message in error_of(path, check_parquet)
