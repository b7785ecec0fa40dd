import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_rl.node import rank_ends
from hpc_rl.node.causes import Kind
from hpc_rl.node.rank_ends import RankExit, log_path, node_end, record_exit, record_start
from tests.small_disk import needs_root, small_disk

RANKS = range(2, 4)


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Two processes that stand for the parents of the ranks of node 1."""
    running = [subprocess.Popen(["sleep", "600"]) for _ in RANKS]
    for rank, process in zip(RANKS, running, strict=True):
        (tmp_path / f".node1-rank{rank}.started").write_text(f"{process.pid}\n")
    yield running
    for process in running:
        process.kill()
        process.wait(600)


def ended(folder: Path, rank: int, exit_code: int, was_asked: bool = False, at: float = 1.0, log: str = "") -> None:
    log_path(folder, 1, rank).write_text(log)
    record_start(folder, 1, rank)
    record_exit(folder, RankExit(rank, 1, exit_code, was_asked, at))


def test_the_first_rank_of_its_node_to_fail_by_itself(tmp_path: Path) -> None:
    ended(tmp_path, 2, 3, at=5.0, log="no luck\n")
    ended(tmp_path, 3, 1, at=4.0, log="Connection closed by peer\n")
    found = node_end(tmp_path, "b", 1, RANKS, 1, was_asked=False)
    assert (found.exit_code, found.kind, found.process) == (3, Kind.OWN, "rank 2")
    assert found.text.startswith("rank 2 on node b failed with exit code 3; its log is ")
    assert found.text.endswith("and ends:\n    no luck")


@pytest.mark.parametrize(("codes", "exit_code"), [((0, 0), 0), ((75, 75), 75), ((0, 75), 75)])
def test_ends_that_are_no_failure(tmp_path: Path, codes: tuple[int, int], exit_code: int) -> None:
    for rank, code in zip(RANKS, codes, strict=True):
        ended(tmp_path, rank, code)
    found = node_end(tmp_path, "b", 1, RANKS, 1 if exit_code else 0, was_asked=False)
    assert (found.exit_code, found.text) == (exit_code, "")


def test_a_killed_torchrun_is_named_and_not_its_ranks(tmp_path: Path) -> None:
    for rank in RANKS:
        ended(tmp_path, rank, 143, was_asked=True)
    found = node_end(tmp_path, "b", 1, RANKS, -9, was_asked=False)
    assert (found.exit_code, found.kind) == (137, Kind.OWN)
    assert found.text == "torchrun on node b was killed (signal 9, SIGKILL), and its ranks with it"
    asked = node_end(tmp_path, "b", 1, RANKS, -15, was_asked=True)
    assert (asked.exit_code, asked.kind, asked.text) == (143, Kind.TERMINATED, "")


def test_a_killed_parent_of_a_rank_is_named_even_if_the_node_was_asked_to_end(
    tmp_path: Path, parents: list["subprocess.Popen[bytes]"]
) -> None:
    parents[1].kill()
    parents[1].wait(600)
    ended(tmp_path, 2, 1, log="Connection closed by peer")
    for was_asked in (True, False):
        found = node_end(tmp_path, "b", 1, RANKS, 1, was_asked)
        assert (found.exit_code, found.kind, found.process) == (137, Kind.OWN, "the parent of rank 3")
        assert found.text.startswith("the parent process of rank 3 on node b (hpc_rl.node.rank) was killed")


@pytest.mark.usefixtures("parents")
def test_a_parent_that_runs_may_record_until_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_ends, "RECORD_TIMEOUT_S", 0.2)
    ended(tmp_path, 2, 0)
    assert rank_ends.await_records(tmp_path, 1, RANKS) == [3]


def test_a_torchrun_that_started_no_rank_explains_itself(tmp_path: Path) -> None:
    (tmp_path / "node1.log").write_text("no module named torch\n")
    found = node_end(tmp_path, "b", 1, RANKS, 1, was_asked=False)
    assert found.exit_code == 1 and found.text.endswith("node1.log:\n    no module named torch")
    asked = node_end(tmp_path, "b", 1, RANKS, 1, was_asked=True)
    assert (asked.exit_code, asked.kind) == (143, Kind.TERMINATED)


def test_bad_input_of_rank_0_is_in_the_jobs_log_already(tmp_path: Path) -> None:
    log_path(tmp_path, 0, 0).write_text("data.x: wrong\n")
    record_start(tmp_path, 0, 0)
    record_exit(tmp_path, RankExit(0, 0, 2, False, 1.0))
    found = node_end(tmp_path, "a", 0, range(1), 1, was_asked=False)
    assert (found.exit_code, found.text) == (2, "")


def test_a_parent_records_its_own_process(tmp_path: Path) -> None:
    record_start(tmp_path, 0, 7)
    assert (tmp_path / ".node0-rank7.started").read_text().split() == [str(os.getpid())]
    assert rank_ends.await_records(tmp_path, 0, [6]) == []


@needs_root
def test_an_end_is_recorded_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        for rank in RANKS:
            record_start(disk.path, 1, rank)
        disk.use_all_inodes()
        with contextlib.suppress(OSError), (disk.path / ".inodes" / "0").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for rank in RANKS:
            record_exit(disk.path, RankExit(rank, 1, 75 + rank, rank == 3, 0.1 + rank))
        assert rank_ends.await_records(disk.path, 1, RANKS) == []
        assert rank_ends.read_exits(disk.path, 1) == [RankExit(2, 1, 77, False, 2.1), RankExit(3, 1, 78, True, 3.1)]
        assert not list(disk.path.glob("*.started"))


def test_a_record_fits_into_what_is_reserved() -> None:
    longest = RankExit(10**6, 10**6, 255, False, time.time() + 1e9 / 3)
    assert len(json.dumps(asdict(longest))) + len("4194304\n") < rank_ends._RECORD_BYTES
