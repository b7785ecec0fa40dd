"""Full and read-only file systems."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.system.disk import Space, explained, mount_of, refuse_unwritable, space_of
from hpc_rl.system.files import LineFile
from tests.small_disk import SmallDisk, needs_root, small_disk

MOUNTS = """\
rootfs / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
scratch /home/me/my\\040scratch lustre rw 0 0
over /home tmpfs rw 0 0
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size="2m", inodes=50) as found:
        yield found


def test_the_file_system_of_a_path() -> None:
    assert mount_of(Path("/home/me/my scratch/run"), MOUNTS) == ("/home/me/my scratch", "lustre")
    assert mount_of(Path("/home/you"), MOUNTS) == ("/home", "tmpfs")  # mounted over the other one
    assert mount_of(Path("/var"), MOUNTS) == ("/", "ext4")


def test_free_space_as_text() -> None:
    assert str(Space("/s", "lustre", 1_234_000_000, 5_000, False)) == (
        "file system /s (lustre) has 1.23 GB and 5,000 inodes free"
    )
    assert str(Space("/s", "btrfs", 999, None, False)) == "file system /s (btrfs) has 999 bytes free"
    assert str(Space("/s", "nfs", 10, 10, True)) == "file system /s (nfs) is read-only"


@pytest.mark.parametrize(
    ("space", "is_short"),
    [
        (Space("/s", "x", 10**9, 10**6, False), False),
        (Space("/s", "x", 10**9, None, False), False),
        (Space("/s", "x", 64 * 2**20, 100, False), False),
        (Space("/s", "x", 64 * 2**20 - 1, 100, False), True),
        (Space("/s", "x", 64 * 2**20, 99, False), True),
        (Space("/s", "x", 10**9, 10**6, True), True),
    ],
)
def test_little_space_is_a_problem(space: Space, is_short: bool) -> None:
    assert space.problem == (str(space) if is_short else None)


def test_an_error_that_no_space_would_prevent(tmp_path: Path) -> None:
    assert explained(OSError(errno.EISDIR, "Is a directory"), tmp_path) == "Is a directory"


@needs_root
def test_a_folder_on_a_full_file_system(disk: SmallDisk) -> None:
    refuse_unwritable(disk.path, "the folder")
    disk.fill()
    message = (
        rf"the folder is not writable: {disk.path}: No space left on device: file system {disk.path} \(tmpfs\) has 0 "
        r"bytes and \d+ inodes free; free space or raise your quota"
    )
    with pytest.raises(UserError, match=message):
        refuse_unwritable(disk.path, "the folder")
    disk.fill(leave_bytes=20480)
    with pytest.raises(UserError, match=r"No space left on device: .* has 20,480 bytes and"):
        refuse_unwritable(disk.path, "the folder")
    disk.free()
    disk.use_all_inodes()
    with pytest.raises(UserError, match=r"No space left on device: .* and 0 inodes free"):
        refuse_unwritable(disk.path, "the folder")


@needs_root
def test_a_folder_on_a_read_only_file_system(disk: SmallDisk) -> None:
    disk.read_only()
    with pytest.raises(UserError, match=rf"Read-only file system: file system {disk.path} \(tmpfs\) is read-only$"):
        refuse_unwritable(disk.path, "the folder")
    assert space_of(disk.path / "not" / "there").read_only


@needs_root
@pytest.mark.parametrize("outage", ["full", "read-only"])
def test_lines_wait_for_space(disk: SmallDisk, capsys: pytest.CaptureFixture[str], outage: str) -> None:
    lines = LineFile(disk.path / "metrics.jsonl")
    lines.write("first")
    if outage == "full":
        disk.fill(leave_bytes=0)
    else:
        disk.read_only()
    long = "x" * 5000  # a part of it may fit
    for _ in range(3):
        lines.write(long)
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: ") == 1
    disk.read_only(False)
    disk.free()
    lines.write("last")
    assert (disk.path / "metrics.jsonl").read_text().split("\n") == ["first", long, long, long, "last", ""]
    assert "metrics.jsonl can be written again" in capsys.readouterr().err


def test_a_line_that_a_killed_process_left_is_ended(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("half")
    LineFile(tmp_path / "lines").write("whole")
    assert (tmp_path / "lines").read_text() == "half\nwhole\n"


def test_only_the_newest_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "lines")
    with monkeypatch.context() as patch:

        def full() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("hpc_rl.system.files.MOST_PENDING_BYTES", 10)
        patch.setattr(lines, "_append", full)
        lines.write("1234", "5678", "90")
    lines.flush()
    assert (tmp_path / "lines").read_text() == "5678\n90\n"


@needs_root
def test_a_process_goes_on_if_its_output_is_lost(disk: SmallDisk) -> None:
    code = (
        "import sys; from hpc_rl.system.disk import tolerate_lost_output; tolerate_lost_output()\n"
        "for number in range(3): print('x' * 5000, flush=True); print('y', file=sys.stderr); input()\n"
        "print('the end')\n"
    )
    with (disk.path / "log").open("ab") as log:
        disk.fill()
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        disk.free()
        child.communicate("\n\n", timeout=600)
    assert child.returncode == 0
    assert (disk.path / "log").read_text().endswith("the end\n")
