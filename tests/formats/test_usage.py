from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.formats.usage import (
    Gpu,
    UsageSample,
    append_line,
    parse_usage,
    read_spans,
    read_usage,
    sample_line,
    usage_file,
)

FIRST = {"time": 1000.0, "node": "gpu01", "job_id": "7", "cpus": 32, "memory_gb": 256.0}


def write(folder: Path, rank: int, samples: int, exit_code: int | None) -> None:
    path = usage_file(folder, rank)
    append_line(path, FIRST | {"node": f"gpu0{rank}"})
    for number in range(samples):
        sample = UsageSample(1002.0 + number, 1.5, 20.0 + number, (Gpu(0.5, 60.123456, 85.9), Gpu(None, 1.0, 85.9)))
        append_line(path, sample_line(sample))
    if exit_code is not None:
        append_line(path, {"time": 4600.0, "exit_code": exit_code})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, 10, 3, exit_code=75)
    write(tmp_path, 2, 500, exit_code=None)
    (tmp_path / "node2-usage.jsonl.partial").write_text("{}")
    killed, ended = read_usage(tmp_path)
    assert (killed.rank, killed.node, killed.job_id, killed.cpus) == (2, "gpu02", "7", 32)
    assert len(killed.samples) == 500 and killed.exit_code is None and killed.ended == 1501.0
    assert (ended.rank, ended.exit_code, ended.hours) == (10, 75, 1.0)
    assert ended.samples[0] == UsageSample(1002.0, 1.5, 20.0, (Gpu(0.5, 60.12, 85.9), Gpu(None, 1.0, 85.9)))


def test_ends_alone_tell_the_same_of_begin_and_end(tmp_path: Path) -> None:
    for rank, samples, exit_code in ((0, 0, None), (1, 0, 0), (2, 1, None), (3, 300, None), (4, 300, 1)):
        write(tmp_path, rank, samples, exit_code)
    for whole, quick in zip(read_usage(tmp_path), read_spans(tmp_path), strict=True):
        assert (quick.began, quick.ended, quick.exit_code) == (whole.began, whole.ended, whole.exit_code)
        assert quick.samples == whole.samples[-len(quick.samples) or len(whole.samples) :]
        assert len(quick.samples) <= 2


def test_no_room_costs_the_line_alone(tmp_path: Path) -> None:
    append_line(Path("/dev/full"), FIRST)
    append_line(tmp_path / "none" / "node0-usage.jsonl", FIRST)
    assert read_usage(tmp_path / "none") == []


@given(st.lists(st.one_of(st.text(max_size=20), st.just(json.dumps(FIRST))), max_size=6))
def test_any_lines_are_a_node_or_none(lines: list[str]) -> None:
    found = parse_usage(0, lines)
    assert (found is None) == (json.dumps(FIRST) not in lines)
