"""File locks, and the mount options that make them local to a node."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.system.locks import is_locked, local_by_mount, locked


def test_a_lock_of_another_process_is_seen_until_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "file"
    hold = (
        "import sys, pathlib\nfrom hpc_rl.system.locks import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert is_locked(file)
        holder.communicate("", timeout=600)
    assert not is_locked(file)
    with locked(file):
        assert is_locked(file)


def test_without_locks_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "file"), pytest.raises(OSError, match="not implemented"):
        is_locked(tmp_path / "file")


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
10.0.0.1@tcp:/lus /lus lustre rw,localflock,lazystatfs 0 0
10.0.0.1@tcp:/good /good lustre rw,flock,lazystatfs 0 0
nas:/a /nfs3 nfs rw,vers=3,nolock,local_lock=all 0 0
nas:/b /nfs4 nfs4 rw,vers=4.2,local_lock=none 0 0
beegfs_nodev /bee beegfs rw,cfgFile=/etc/beegfs/beegfs-client.conf 0 0
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/lus/me/run", "/lus (lustre, mounted with localflock)"),
        ("/nfs3/me", "/nfs3 (nfs, mounted with local_lock=all, nolock)"),
        ("/good/me", None),
        ("/nfs4/me", None),
        ("/bee/me", None),
        ("/home/me", None),
    ],
)
def test_mount_options_show_local_locks(path: str, found: str | None) -> None:
    assert local_by_mount(Path(path), MOUNTS) == found
