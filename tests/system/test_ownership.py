import grp
import os
import pwd
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.system.ownership import (
    foreign_entry,
    make_writable,
    open_own,
    others_write,
    own_folders,
    private_folder,
    weakness,
)

OTHER = 64242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def test_an_own_file_is_opened_and_created(tmp_path: Path) -> None:
    with open_own(tmp_path / "new", "a+") as file:
        file.write("text")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    with open_own(tmp_path / "new") as file:
        assert file.read() == "text"
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "none")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    (path.parent / "target").touch()
    path.symlink_to("target")


def second_name(path: Path) -> None:
    path.touch()
    path.with_name("second").hardlink_to(path)


def open_to_all(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def of_another_user(path: Path) -> None:
    path.touch()
    os.chown(path, OTHER, OTHER)


def in_a_folder_of_another_user(path: Path) -> None:
    path.touch()
    os.chown(path.parent, OTHER, OTHER)


def in_a_linked_folder(path: Path) -> None:
    path.touch()
    path.parent.rename(path.parent.with_name("real"))
    path.parent.symlink_to("real")


@pytest.mark.parametrize(
    "make",
    [
        fifo,
        Path.mkdir,
        link,
        second_name,
        open_to_all,
        in_a_linked_folder,
        pytest.param(of_another_user, marks=needs_root),
        pytest.param(in_a_folder_of_another_user, marks=needs_root),
    ],
)
@pytest.mark.parametrize("mode", ["r", "a+"])
def test_what_may_be_another_users_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], mode: str) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    make(path)
    caught: list[OSError] = []

    def attempt() -> None:
        try:
            open_own(path, mode).close()
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt, daemon=True)  # opening a FIFO would wait for ever
    thread.start()
    thread.join(600)
    assert not thread.is_alive() and caught


@needs_root
def test_own_folders_are_real_and_of_this_user(tmp_path: Path) -> None:
    for name in ("7.mine", "7.theirs", "8.mine"):
        (tmp_path / name).mkdir()
    os.chown(tmp_path / "7.theirs", OTHER, OTHER)
    (tmp_path / "7.link").symlink_to("7.mine")
    (tmp_path / "7.file").touch()
    assert own_folders(tmp_path, "7.*") == [tmp_path / "7.mine"]
    assert [private_folder(tmp_path / name) for name in ("7.new", "7.mine", "7.theirs", "7.link", "7.file")] == [
        *(True, False, False, False, False)
    ]


def test_only_folders_are_made_writable_and_no_links_target(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError, match="Not a directory"):
        make_writable(tmp_path / "link")
    assert folder.stat().st_mode & 0o777 == 0o500
    make_writable(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_group_with_the_users_name_and_no_other_member_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o770)
    me, gid = pwd.getpwuid(os.geteuid()), tmp_path.stat().st_gid
    accounts = [me]
    monkeypatch.setattr(pwd, "getpwall", lambda: accounts)
    found: dict[str, object] = {"gr_name": me.pw_name, "gr_mem": []}
    monkeypatch.setattr(grp, "getgrgid", lambda _gid: SimpleNamespace(**found))
    assert not others_write(tmp_path)
    found["gr_mem"] = ["alice"]
    assert others_write(tmp_path)
    found |= {"gr_name": "users", "gr_mem": []}
    assert others_write(tmp_path)
    found["gr_name"] = me.pw_name
    accounts.append(pwd.struct_passwd(("alice", "x", 1000, gid, "", "/", "/bin/sh")))
    assert others_write(tmp_path)


@pytest.mark.parametrize(
    ("tag", "permissions", "who", "writes"),
    [(2, 7, OTHER, True), (8, 2, OTHER, True), (2, 5, OTHER, False), (8, 5, OTHER, False), (2, 7, os.geteuid(), False)],
)
def test_an_access_control_list_that_names_others_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: int, permissions: int, who: int, writes: bool
) -> None:
    """The group of the folder is private. The list of acl(5): the owner, one named entry, the group, mask, others."""
    me, gid = pwd.getpwuid(os.geteuid()).pw_name, tmp_path.stat().st_gid
    names = {gid: SimpleNamespace(gr_name=me, gr_mem=[])}
    monkeypatch.setattr(pwd, "getpwall", lambda: [pwd.getpwuid(os.geteuid())])
    monkeypatch.setattr(grp, "getgrgid", lambda number: names.get(number, SimpleNamespace(gr_name="lab", gr_mem=[])))
    run, none = tmp_path / "run", 2**32 - 1
    run.mkdir()
    entries = [(0x01, 7, none), (tag, permissions, who), (0x04, 7, none), (0x10, 7, none), (0x20, 0, none)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
    try:
        os.setxattr(tmp_path, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    assert others_write(tmp_path) == writes
    expected = f"{tmp_path} can be changed by users in its access control list (getfacl)"
    assert weakness(run) == (expected if writes else None)


@needs_root
def test_a_group_that_is_trusted_may_own_the_folders_above(tmp_path: Path) -> None:
    lab, project = 64243, tmp_path / "project"
    (project / "me" / "run").mkdir(parents=True)
    os.chown(project, OTHER, lab)
    project.chmod(0o2770)
    run = project / "me" / "run"
    assert weakness(run) == f"{project} belongs to user {OTHER}"
    assert weakness(run, OTHER) is not None
    assert weakness(run, lab) is None
    os.chown(project, 0, lab)
    assert weakness(run) == f"{project} can be changed by group {lab}"
    assert weakness(run, lab) is None
    project.chmod(0o2777)
    assert weakness(run, lab) == f"{project} can be changed by all users"
    project.chmod(0o2770)
    run.chmod(0o2770)
    os.chown(run, 0, lab)
    assert weakness(run, lab) == f"it can be changed by group {lab}"  # the run directory itself is only read


def test_links_on_the_way_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(tmp_path / "real")
    assert weakness(tmp_path / "a" / "run") is None
    assert weakness(tmp_path / "a" / ".." / "real" / "none") is None
    (tmp_path / "real").chmod(0o777)
    assert weakness(tmp_path / "a" / "run") == f"{tmp_path / 'real'} can be changed by all users"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="too many symbolic links"):
        weakness(tmp_path / "loop" / "run")


@needs_root
def test_a_folder_of_another_user_below_an_own_one_is_not_own(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert weakness(tmp_path / "run") is None
    os.chown(tmp_path / "run", OTHER, OTHER)
    assert weakness(tmp_path / "run") == f"it belongs to user {OTHER}"


@needs_root
def test_what_another_user_has_put_into_a_folder(tmp_path: Path) -> None:
    """Links count by their own owner, and what is deeper does not count."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "deep").touch()
    os.chown(tmp_path / "own" / "deep", OTHER, OTHER)
    (tmp_path / "link").symlink_to(tmp_path / "own" / "deep")
    assert foreign_entry(tmp_path) is None
    (tmp_path / "planted").symlink_to(tmp_path / "own")
    os.lchown(tmp_path / "planted", OTHER, OTHER)
    assert foreign_entry(tmp_path) == f"planted, which belongs to user {OTHER}"


@needs_root
def test_a_user_namespace_hides_no_other_user(tmp_path: Path) -> None:
    """It shows all users but one under the same id, as in an image."""
    namespace = ["unshare", "--user", "--map-current-user"]
    if subprocess.run([*namespace, "true"], capture_output=True, timeout=60, check=False).returncode != 0:
        pytest.skip("no user namespaces here")
    (tmp_path / "planted").touch()
    os.chown(tmp_path / "planted", OTHER, OTHER)
    program = (
        "import sys, pathlib; from hpc_rl.system.ownership import *; print(foreign_entry(pathlib.Path(sys.argv[1])))"
    )
    command = [*namespace, sys.executable, "-c", program, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert found.startswith("planted, which belongs to user ")
