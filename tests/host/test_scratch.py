import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.host.scratch import file_system, held_scratch, image_folders, local_folder, remove_tree, scratch_dir


def test_the_temporary_folder_is_private_and_goes_with_all_in_it(tmp_path: Path) -> None:
    folder = scratch_dir({"TMPDIR": str(tmp_path)}, "7", 1, None)
    assert folder == tmp_path / f"{os.getuid()}.7.1"
    assert scratch_dir({"TMPDIR": "/no/such"}, "7", 1, 3) == Path(f"/tmp/{os.getuid()}.7.1.3")
    with held_scratch(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "a" / "b").mkdir(parents=True)
    assert not any(tmp_path.iterdir())


def test_folders_of_killed_jobs_are_removed_and_no_others(tmp_path: Path) -> None:
    killed, living = tmp_path / f"{os.getuid()}.1.0", tmp_path / f"{os.getuid()}.2.0"
    make = "import sys, pathlib; from hpc_rl.host.scratch import held_scratch\n"
    hold = make + "with held_scratch(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, killed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout and job.stdout.readline() == "\n"
        job.kill()
    assert killed.is_dir()
    own = tmp_path / f"{os.getuid()}.backup"
    own.mkdir()
    with held_scratch(living), held_scratch(tmp_path / f"{os.getuid()}.3.0"):
        assert living.is_dir() and own.is_dir() and not killed.exists()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be created: Not a directory"), held_scratch(tmp_path / "file" / "x"):
        pass


def test_a_folder_with_read_only_parts_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "a" / "b").chmod(0o500)
    (tmp_path / "a").chmod(0o500)
    remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_images_of_a_job_are_found_by_its_id(tmp_path: Path) -> None:
    for name in ("7.image.abc", "7.image.def", "77.image.abc", "7.0"):
        (tmp_path / f"{os.getuid()}.{name}").mkdir()
    found = image_folders({"TMPDIR": str(tmp_path)}, "7")
    assert sorted(path.name for path in found) == [f"{os.getuid()}.7.image.abc", f"{os.getuid()}.7.image.def"]


def test_the_longest_mount_point_above_a_path_counts() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nnas:/x /no-such lustre rw 0 0\ntmpfs /no-such/local tmpfs rw 0 0\n"
    for path, kind in (
        ("/etc", "ext4"),
        ("/no-such/x", "lustre"),
        ("/no-such/local/x", "tmpfs"),
        ("/no-such2", "ext4"),
    ):
        assert file_system(Path(path), mounts) == kind
    assert file_system(Path("/etc"), "") == ""


def test_local_folder(tmp_path: Path) -> None:
    assert local_folder({}) == Path("/tmp")
    assert local_folder({"TMPDIR": ""}) == Path("/tmp")
    assert local_folder({"TMPDIR": str(tmp_path / "missing")}) == Path("/tmp")
    assert local_folder({"TMPDIR": str(tmp_path)}) == tmp_path
