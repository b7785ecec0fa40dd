"""A small file system of its own, to fill it up or to make it read-only. Only root can mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


class SmallDisk:
    """A tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler, self._files = path / ".filler", path / ".inodes"

    def fill(self, leave_bytes: int = 0) -> None:
        """Use all space except the last bytes."""
        self.free()
        found = os.statvfs(self.path)
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            left = found.f_bavail * found.f_frsize - leave_bytes
            while left > 0:
                left -= file.write(bytes(min(left, 4096)))

    def free(self) -> None:
        """Give the space and the inodes back."""
        self._filler.unlink(missing_ok=True)
        shutil.rmtree(self._files, ignore_errors=True)

    def use_all_inodes(self) -> None:
        with suppress(OSError):
            self._files.mkdir(exist_ok=True)
            for number in range(10**6):
                (self._files / str(number)).touch()

    def read_only(self, value: bool = True) -> None:
        subprocess.run(
            ["mount", "-o", f"remount,{'ro' if value else 'rw'}", self.path],
            check=True,
            timeout=300,
            capture_output=True,
        )


@contextmanager
def small_disk(path: Path, size: str = "8m", inodes: int = 1000, more: str = "") -> Iterator[SmallDisk]:
    """Mount an empty file system on a new folder, with more options such as `,noexec`."""
    path.mkdir()
    options = f"size={size},nr_inodes={inodes},mode=700{more}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small-disk", path], check=True, timeout=300)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True, timeout=300)


def await_folder(path: Path, timeout_s: float = 600) -> None:
    """Wait until a checkpoint that is written in the background has its name."""
    deadline = time.monotonic() + timeout_s
    while not path.is_dir():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s there is no {path}"
        time.sleep(0.05)
