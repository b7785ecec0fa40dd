"""Records of torch's flight recorder: real ones of gloo, and ones of NCCL in the documented format."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.doctor import diagnosis
from hpc_rl.liveness import flight_records
from hpc_rl.liveness.flight_records import (
    LARGEST_BYTES,
    NoRecordError,
    Record,
    explanations,
    groups_of,
    read_record,
)
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus

LATE = Path(__file__).with_name("late_rank.py")
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of gloo leave, of which rank 1 has not joined the third collective."""
    folder = tmp_path_factory.mktemp("attempt")
    group = str(tmp_path_factory.mktemp("ranks") / "group")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    ranks = [
        subprocess.Popen([sys.executable, str(LATE), str(folder), str(rank), group], env=environ) for rank in (1, 0)
    ]
    try:
        assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


def test_the_late_rank_is_named_with_the_collective(recorded: Path) -> None:
    (line,) = explanations(recorded)
    assert re.sub(r":\d+", ":N", line) == (
        "flight recorder: rank 1 did not reach all_gather [[1, 1]], number 4 of group default_pg, in which rank 0 "
        "waits at late_rank.py:N; the last one was all_gather at late_rank.py:N"
    )


def test_a_rank_without_a_record_is_named(recorded: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    shutil.copytree(recorded, attempt)
    (attempt / "flight-rank1").unlink()
    for name in ("node0-rank0.log", "node0-rank1.log", "node0.log"):
        (attempt / name).touch()
    (line,) = explanations(attempt)
    assert line.startswith("flight recorder: rank 1 left no record") and "rank 0 is in all_gather [[1, 1]]" in line
    run = RunDir(tmp_path)
    found = diagnosis.explain_run(run, RunStatus("run", str(tmp_path), "7", "FAILED")).findings
    assert [one.failure.title for one in found] == ["A collective was not joined by all ranks"]
    assert found[0].line == line


def compare(records: Mapping[int, Record]) -> list[str]:
    """The lines of the findings."""
    return [finding.line for finding in flight_records.compare(records)]


def entry(number: int, name: str = "all_reduce", state: str = "completed", **changes: Any) -> dict[str, Any]:
    """One entry in the format 2.10 (torch/csrc/distributed/c10d/FlightRecorder.hpp)."""
    frames = [
        {"filename": "/env/torch/distributed/distributed_c10d.py", "line": 3245, "name": name},
        {"filename": "/home/me/model.py", "line": 10 * number, "name": "forward"},
    ]
    found = {
        "process_group": ("0", "default_pg"), "collective_seq_id": number, "is_p2p": False, "frames": frames,
        "profiling_name": f"nccl:{name}", "input_sizes": [[8]], "state": state,
    }  # fmt: skip
    return {**found, **changes}


def dump(*entries: Mapping[str, Any], ranks: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


def test_a_rank_that_is_behind() -> None:
    ahead = groups_of(dump(entry(1), entry(2, "reduce_scatter", "started"), entry(3, state="scheduled")))
    behind = groups_of(dump(entry(1)))
    assert compare({0: ahead, 1: behind, 2: ahead}) == [
        "rank 1 did not reach reduce_scatter [[8]], number 2 of group default_pg, in which ranks 0, 2 wait at "
        "model.py:20; the last one was all_reduce at model.py:10"
    ]


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_the_rank_that_waits_for_nobody_comes_first(library: str) -> None:
    """Rank 2 computes; rank 1 waits for it in another group, and rank 0 waits for rank 1."""
    pair = {"process_group": ("5", "shards")}

    def made(number: int, **changes: Any) -> dict[str, Any]:
        return entry(number, profiling_name=f"{library}:all_reduce", **changes)

    first = groups_of(dump(made(1), made(2, state="scheduled")))
    second = groups_of(dump(made(1), made(7, **pair), made(8, state="scheduled", **pair)))
    third = groups_of(dump(made(1), made(7, **pair)))
    records = {0: first, 1: second, 2: third}
    assert [finding.ranks for finding in flight_records.compare(records)] == [(2,), (2,)]
    lines = compare(records)
    assert lines[0].startswith("rank 2 did not reach all_reduce [[8]], number 8 of group shards, in which rank 1 waits")
    assert lines[1].startswith("ranks 1, 2 did not reach all_reduce [[8]], number 2 of group default_pg")


def test_different_collectives() -> None:
    gather = groups_of(dump(entry(1), entry(2, "all_gather", "started")))
    reduce = groups_of(dump(entry(1), entry(2, "all_reduce", "started"), entry(3, state="scheduled")))
    assert compare({0: reduce, 1: gather, 2: reduce}) == [
        "the ranks made different collectives as number 2 of group default_pg: rank 1 all_gather at model.py:20, "
        "ranks 0, 2 all_reduce [[8]] at model.py:20"
    ]


def test_different_sizes_of_a_reduction_but_not_of_a_gather() -> None:
    def sized(name: str, size: int) -> Any:
        return groups_of(dump(entry(1, name, "started", input_sizes=[[size]]), ranks=(0, 1)))

    assert "rank 1 all_reduce [[9]]" in compare({0: sized("all_reduce", 8), 1: sized("all_reduce", 9)})[0]
    assert compare({0: sized("all_gather", 8), 1: sized("all_gather", 9)})[0].startswith("all ranks began all_gather")


def test_a_collective_that_all_have_begun_points_at_the_network() -> None:
    stuck = groups_of(dump(entry(1), entry(2, state="started")))
    (line,) = compare(dict.fromkeys(range(3), stuck))
    assert line.startswith("all ranks began all_reduce [[8]], number 2 of group default_pg at model.py:20")


def test_a_rank_that_is_missing_from_the_group() -> None:
    lines = compare({rank: groups_of(dump(entry(1), entry(2, state="started"))) for rank in (0, 2)})
    assert lines == [
        "rank 1 left no record: ended, or hangs outside of torch.distributed. rank 0 is in all_reduce [[8]] of group "
        "default_pg at model.py:20; rank 2 is in all_reduce [[8]] of group default_pg at model.py:20"
    ]


def test_point_to_point_messages_and_finished_ranks_are_no_findings() -> None:
    done = groups_of(dump(entry(1)))
    sends = groups_of(dump(entry(1), entry(9, "send", "started", is_p2p=True)))
    assert compare({0: done, 1: sends, 2: done}) == []
    assert compare({}) == []


def test_many_ranks_are_counted() -> None:
    behind, ahead = groups_of(dump(entry(1))), groups_of(dump(entry(1), entry(2, state="started")))
    (line,) = compare({rank: ahead if rank == 0 else behind for rank in range(20)})
    assert line.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more did not reach")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps({"entries": [Evil()]}), r"it names \w+\.mkdir, which no flight recorder writes"),
        (pickle.dumps({"entries": [{"process_group": 3}]}), "TypeError"),
        (pickle.dumps([1]), "AttributeError"),
        (pickle.dumps(dump(entry(1)))[:-40], "UnpicklingError|EOFError"),
        (b"", "EOFError"),
    ],
)
def test_a_file_that_is_no_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "flight-train-rank3"
    path.write_bytes(content)
    with pytest.raises(NoRecordError, match=message):
        read_record(path)
    assert not (tmp_path / "owned").exists()
    assert explanations(tmp_path)[0].startswith("flight recorder: flight-train-rank3 cannot be read: ")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "flight-rank0"
    with path.open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)
    with pytest.raises(OSError, match="it has more than 67,108,864 bytes"):
        read_record(path)


def test_the_records_of_a_pool_are_compared_among_themselves(tmp_path: Path) -> None:
    for pool in ("a-b", "c"):
        for rank, entries in enumerate([[entry(1), entry(2, state="started")], [entry(1)]]):
            path = tmp_path / f"flight-{pool}-rank{rank}"
            path.write_bytes(pickle.dumps(dump(*entries, ranks=(0, 1))))
    lines = explanations(tmp_path)
    assert [line.rpartition(" of ")[2] for line in lines] == ["pool a-b", "pool c"]
    assert all("rank 1 did not reach" in line for line in lines)


def test_the_two_records_of_a_rank_on_a_gpu_are_compared_together(tmp_path: Path) -> None:
    """Both libraries count by themselves. Rank 2 has not reached the collective of gloo in which rank 1 waits, and
    rank 0 waits for rank 1 on its GPU."""
    gloo = {"profiling_name": "gloo:all_gather"}
    nccl = [[entry(1), entry(2, state="scheduled")], [entry(1)], [entry(1)]]
    host = [[entry(7, **gloo)], [entry(7, **gloo), entry(8, state="scheduled", **gloo)], [entry(7, **gloo)]]
    for rank, entries in enumerate(nccl):
        (tmp_path / f"flight-a-rank{rank}").write_bytes(pickle.dumps(dump(*entries)))
        (tmp_path / f"flight-a-rank{rank}.gloo").write_bytes(pickle.dumps(dump(*host[rank])))
    first, second = flight_records.wait_causes(tmp_path)
    assert (first.ranks, second.ranks) == ((2,), (2,))
    assert "ranks 0, 2 did not reach all_gather [[8]], number 8 of group default_pg (gloo)," in second.line
    assert first.names == ["rank 2 of pool a"] and first.line.endswith(" of pool a")
