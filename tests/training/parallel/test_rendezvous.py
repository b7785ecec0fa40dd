"""How ranks find each other: threads stand for them."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.training.parallel import distributed, rendezvous
from hpc_rl.training.parallel.rendezvous import meet, refuse_others, refuse_slices

TIMEOUT_S = 600


def test_ranks_share_a_store_that_nobody_else_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda rank: meet(folder, rank, 3, TIMEOUT_S), range(3)))
    stores[0].set("address", "10.0.0.1")
    assert stores[2].get("address") == b"10.0.0.1"
    stores[2].wait(["address"], timedelta(seconds=TIMEOUT_S))
    assert sorted(store.add("arrived", 1) for store in stores) == [1, 2, 3]
    assert folder.stat().st_mode & 0o077 == 0


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"4 ranks must start within 0 s .* these did not: \[0, 2, 3\]"):
        meet(tmp_path / "group", 1, 4, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_serves_one_group(tmp_path: Path, rank: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: meet(tmp_path, rank, 2, TIMEOUT_S), range(2)))
    with pytest.raises(UserError, match="each group needs a new folder"):
        meet(tmp_path, rank, 2, TIMEOUT_S)


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_others(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="must be a folder that belongs to user"):
        refuse_others(tmp_path / "link")
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="mode drwxrwxrwx"):
        meet(tmp_path, 0, 2, 0)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to user 12345"):
        meet(tmp_path, 0, 2, 0)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("a", "b"), r"^rank 0 ended .*; or, if rank 0 still runs, file locks do not reach from node to node"),
        (("a", "a"), r"^rank 0 ended while the ranks met: its log has the reason$"),
    ],
)
def test_locks_that_do_not_reach_other_nodes_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str], said: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    for rank, host in enumerate(hosts):  # both have arrived
        (tmp_path / f"rank-{rank}").write_text(host)
    monkeypatch.setattr(rendezvous, "_arrive", lambda *_: None)
    meet(tmp_path, 0, 2, TIMEOUT_S)
    with pytest.raises(UserError, match=said):
        meet(tmp_path, 1, 2, TIMEOUT_S)


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="Function not implemented; if the file system has no locks"):
        meet(tmp_path, 0, 2, TIMEOUT_S)


def test_several_ranks_need_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("HPC_RL_GROUP_DIR", raising=False)
    with pytest.raises(UserError, match=r"HPC_RL_GROUP_DIR=\$\(mktemp -d\) torchrun --nproc-per-node 2"):
        distributed.start("cpu", TIMEOUT_S)


def test_ranks_on_slices_of_one_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "node1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    refuse_slices(["node1", "node2"])
    with pytest.raises(UserError, match=r"2 ranks on node1 would use slices of GPUs \(MIG\)"):
        refuse_slices(["node1", "node2", "node1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    refuse_slices(["node1", "node2", "node1"])
