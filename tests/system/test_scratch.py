import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from hpc_rl.errors import UserError
from hpc_rl.system import scratch
from hpc_rl.system.disk import file_system
from hpc_rl.system.scratch import (
    job_folders,
    job_scratch,
    local_folder,
    local_folder_problem,
    marked_in_use,
    own_scratch,
    programs_tmpdir,
    remove_abandoned,
    remove_recorded,
    remove_tree,
    unfit,
)
from tests.small_disk import needs_root, small_disk


def test_the_temporary_folder_is_private_and_goes_with_all_in_it(tmp_path: Path) -> None:
    node, attempt = tmp_path / "node", tmp_path / "attempt"
    node.mkdir()
    attempt.mkdir()
    with job_scratch({"TMPDIR": str(node)}, "7", attempt, 1) as folder:
        assert folder.parent == node and re.fullmatch(rf"{os.getuid()}\.7\.[0-9a-f]{{6}}", folder.name)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (attempt / ".node1.scratch").read_text() == str(folder)
        (folder / "a" / "b").mkdir(parents=True)
    assert not any(node.iterdir())
    with job_scratch({"TMPDIR": str(node)}, "7", attempt, 1) as another:
        assert another != folder


@pytest.mark.parametrize("folder", ["job_scratch(os.environ, '1', pathlib.Path('.'), 0)", "own_scratch(os.environ)"])
def test_folders_of_killed_jobs_are_removed_and_no_others(tmp_path: Path, folder: str) -> None:
    environ = {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "1"}
    make = "import os, sys, pathlib; from hpc_rl.system.scratch import job_scratch, own_scratch\n"
    hold = make + f"with {folder} as path: print(path, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, **environ},
    ) as job:  # fmt: skip
        assert job.stdout
        killed = Path(job.stdout.readline().strip())
        job.kill()
    assert killed.is_dir() and job_folders(environ, "1") == [killed]
    own = tmp_path / f"{os.getuid()}.backup"
    own.mkdir()
    with job_scratch(environ, "2", tmp_path, 0) as living, job_scratch(environ, "3", tmp_path, 0):
        assert living.is_dir() and own.is_dir() and not killed.exists()


def test_a_process_of_a_job_removes_its_own_folder(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    with job_scratch(environ, "7", tmp_path, 0) as of_the_job, own_scratch(environ) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700 and folder != of_the_job
        (folder / "file").touch()
        remove_abandoned([folder])
        assert set(job_folders(environ, "7")) == {of_the_job, folder}
    assert not job_folders(environ, "7")
    with pytest.raises(PermissionError), own_scratch({"TMPDIR": str(tmp_path)}) as folder:
        assert folder.name.startswith(f"{os.getuid()}.local.")
        raise PermissionError
    assert not folder.exists()


def test_a_folder_that_is_still_in_use_is_left_to_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    monkeypatch.setattr(scratch, "remove_scratch", lambda folder: bool((folder / ".hpc-rl").unlink()))
    with pytest.raises(KeyError), job_scratch(environ, "1", tmp_path, 0) as left:
        raise KeyError
    assert left.is_dir() and "is still in use" in capsys.readouterr().err
    monkeypatch.undo()
    with job_scratch(environ, "2", tmp_path, 0):
        assert not left.exists()


def test_what_a_killed_node_entry_left_is_found_by_its_record(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    (tmp_path / ".node3.scratch").write_text(str(left))
    remove_recorded(tmp_path, 2)
    assert left.is_dir()
    remove_recorded(tmp_path, 3)
    assert not left.exists()


def test_a_folder_that_cannot_be_created_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    with (
        pytest.raises(UserError, match="cannot be created: No such file"),
        job_scratch(environ, "7", tmp_path / "no", 0),
    ):
        pass
    assert not any(tmp_path.iterdir())


def test_a_temporary_folder_that_others_can_change_is_not_used(tmp_path: Path) -> None:
    assert local_folder({"TMPDIR": str(tmp_path)}) == tmp_path
    tmp_path.chmod(0o777)
    assert local_folder({"TMPDIR": str(tmp_path)}) == Path("/tmp")
    tmp_path.chmod(0o1777)
    assert local_folder({"TMPDIR": str(tmp_path)}) == tmp_path


@pytest.mark.parametrize(
    ("given", "scratch", "found"),
    [
        ("/local/7", "/local/7/0.7.abc", "/local/7"),
        ("/local/7/", "/local/7/0.7.abc", "/local/7/"),
        ("/shared", "/tmp/0.7.abc", "/tmp/0.7.abc"),
        ("/tmp", "/tmp/0.7.abc", "/tmp/0.7.abc"),
        ("", "/tmp/0.7.abc", "/tmp/0.7.abc"),
        (None, "/tmp/0.7.abc", "/tmp/0.7.abc"),
    ],
)
def test_programs_keep_a_tmpdir_of_their_own(given: str | None, scratch: str, found: str) -> None:
    environ = {} if given is None else {"TMPDIR": given}
    assert programs_tmpdir(environ, Path(scratch)) == found


def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody can tell whether a folder is in use, and it stays."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with marked_in_use(tmp_path):
        remove_abandoned([tmp_path])
        assert tmp_path.is_dir()


def test_a_folder_with_read_only_parts_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "a" / "b").chmod(0o500)
    (tmp_path / "a").chmod(0o500)
    remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_folders_of_a_job_are_found_by_its_id(tmp_path: Path) -> None:
    for name in ("987654.image.abc", "987654.def", "9876547.abc", "98765.0"):
        (tmp_path / f"{os.getuid()}.{name}").mkdir()
    (tmp_path / f"{os.getuid()}.987654.link").symlink_to(tmp_path)
    found = job_folders({"TMPDIR": str(tmp_path)}, "987654")
    assert [path.name for path in found] == [f"{os.getuid()}.987654.def", f"{os.getuid()}.987654.image.abc"]


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


@needs_root
def test_a_folder_whose_files_cannot_be_executed_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", more=",noexec") as disk:
        program = disk.path / "program"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        with pytest.raises(PermissionError):
            subprocess.run([program], check=True, timeout=60)
        environ = {"TMPDIR": str(disk.path)}
        assert local_folder(environ) == Path("/tmp")
        said = f"files in {disk.path} cannot be executed (the file system is mounted with noexec): /tmp is used instead"
        assert local_folder_problem(environ) == said
        with job_scratch(environ, "7", tmp_path, 0) as folder:
            assert folder.parent == Path("/tmp")
            assert programs_tmpdir(environ, folder) == str(folder)
            assert folder in job_folders(environ, "7")
        assert said in capsys.readouterr().out
        monkeypatch.setattr(scratch, "PLACES", (disk.path / "missing", tmp_path))
        assert local_folder(environ) == tmp_path
        monkeypatch.setattr(scratch, "PLACES", (disk.path / "missing",))
        assert local_folder(environ) == disk.path  # better than none
        assert local_folder_problem(environ).endswith("no other local folder is better")
    assert local_folder_problem({"TMPDIR": str(tmp_path)}) == ""


def test_a_folder_without_locks_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: IO[bytes], _: int) -> None:
        if os.fstat(file.fileno()).st_dev == tmp_path.stat().st_dev and refused:
            raise OSError(37, "No locks available")

    refused = ["yes"]
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert unfit(tmp_path) == "locked (No locks available)"
    refused.clear()
    assert unfit(tmp_path) == ""
    assert unfit(tmp_path / "missing") == ""  # it is not judged


def test_local_folder(tmp_path: Path) -> None:
    assert local_folder({}) == Path("/tmp")
    assert local_folder({"TMPDIR": ""}) == Path("/tmp")
    assert local_folder({"TMPDIR": str(tmp_path / "missing")}) == Path("/tmp")
    assert local_folder({"TMPDIR": str(tmp_path)}) == tmp_path
