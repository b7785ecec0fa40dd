from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.tracking.formatting import duration, number, step_line
from hpc_rl.tracking.metrics import MetricsFile, parse_line, read_metrics, read_thinned, write_csv


def steps_and_losses(path: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["train/loss"]) for record in read_metrics(path)]


def test_lines_are_there_at_once_and_nan_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.write(1, 10, {"train/loss": float("nan"), "train/lr": 0.5, "train/grad_norm": float("inf")})
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["step"] == 1 and line["total_steps"] == 10 and line["time"] > 1e9
    assert line["train/loss"] is None and line["train/grad_norm"] is None and line["train/lr"] == 0.5


def test_lines_of_one_step_are_one_record(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, 2, {"train/loss": 3.0})
    file.write(1, 2, {"val/loss": 4.0})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["train/loss"] == 3.0 and record["val/loss"] == 4.0


def test_a_resumed_run_takes_back_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 8):
        first.write(step, 10, {"train/loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 8, "train/lo')  # killed in the middle of a line
    assert [step for step, _ in steps_and_losses(path)] == list(range(1, 8))
    again = MetricsFile(path)
    again.write(5, 10, {"train/loss": 2.0})
    assert steps_and_losses(path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)]
    again.write(6, 10, {"train/loss": 2.0})
    assert steps_and_losses(path)[-1] == (6, 2.0)


def test_no_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_of_a_long_run_some_steps_and_all_validations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 12):
        file.write(step, 20, {"train/loss": float(step)} | ({"val/loss": 0.5} if step in (3, 4) else {}))
    found = read_thinned(path, 4)
    assert found.every == 3, "11 steps are to be 4 or a few more"
    kept = [{key: value for key, value in record.items() if "/" in key} for record in found.records]
    assert [record["step"] for record in found.records] == [1, 3, 4, 7, 10, 11]
    assert kept[1] == {"val/loss": 0.5} and kept[2] == {"val/loss": 0.5, "train/loss": 4.0}
    assert kept[0] == {"train/loss": 1.0} and kept[-1] == {"train/loss": 11.0}
    assert read_thinned(path, 11).every == 1 and read_thinned(path, 10).every == 2
    assert read_thinned(path, None).records == read_thinned(path, 11).records == read_metrics(path)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40), st.integers(1, 10))
def test_thinned_metrics_are_a_part_of_all(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, bool]], most: int
) -> None:
    """Whatever a resumed run takes back."""
    path = tmp_path_factory.mktemp("thinned") / "metrics.jsonl"
    rows = [
        {"step": step, "total_steps": 9, "time": 1.0, "val/x" if val else "n": i} for i, (step, val) in enumerate(lines)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    every, expected = read_thinned(path, most).every, []
    for record in (whole := read_metrics(path)):
        if (record["step"] - 1) % every == 0 or record["step"] == whole[-1]["step"]:
            expected.append(record)
        elif "val/x" in record:
            expected.append({key: value for key, value in record.items() if key != "n"})
    assert read_thinned(path, most).records == expected


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 200))
def test_any_cut_of_a_file_can_be_read(tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int) -> None:
    rows = [{"step": step, "total_steps": 9, "n": i} for i, step in enumerate(steps)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_bytes(lines[: max(0, len(lines) - cut)])
    records = read_metrics(path)
    found = [record["step"] for record in records]
    assert found == sorted(set(found))
    if cut == 0 and steps:
        assert records[-1]["n"] == len(steps) - 1


@given(st.binary(max_size=40))
def test_any_bytes_are_a_record_or_none(line: bytes) -> None:
    record = parse_line(line)
    assert record is None or isinstance(record["step"], int)


def test_short_text() -> None:
    numbers = [number(v) for v in (0, 0.83124, 6172.4, 12345.6, 4.56e6, 7e9, 1e-5, -0.5)]
    assert numbers == ["0", "0.8312", "6172", "12.3k", "4.56M", "7G", "1e-05", "-0.5"]
    assert [duration(s) for s in (0, 42, 725, 11045, 183845)] == ["0:00", "0:42", "12:05", "3:04:05", "2-03:04:05"]


def test_a_line_shows_what_there_is() -> None:
    record = {"step": 7, "total_steps": 120, "time": 0, "train/loss": None, "train/lr": 1e-5}
    assert step_line(record) == "step   7/120 | loss nan | lr 1.00e-05"
    record |= {"train/grad_norm": 0.871, "perf/tokens_per_s": 12345.0, "perf/throughput": 6172.5}
    record |= {"perf/mfu": 0.412, "perf/eta_s": 62}
    assert step_line(record).endswith("grad 0.871 | 12.3k tok/s | 6172 tok/s each | MFU 41.2% | ETA 1:02")


def lines_of(path: Path) -> list[tuple[int, list[str]]]:
    """Step and own keys of each line, as a program that knows nothing of attempts reads them."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(record["step"], [key for key in record if "/" in key]) for record in records]


@pytest.mark.parametrize(
    ("first", "key", "left"),
    [
        (1, "train/loss", []),
        (3, "train/loss", [(1, ["train/loss"]), (2, ["train/loss"])]),
        (4, "train/loss", [(1, ["train/loss"]), (2, ["train/loss"]), (3, ["train/loss"])]),
        (3, "val/loss", [(1, ["train/loss"]), (2, ["train/loss"]), (3, ["train/loss"])]),
    ],
)
def test_an_attempt_removes_the_lines_of_the_steps_that_it_repeats(
    tmp_path: Path, first: int, key: str, left: list[tuple[int, list[str]]]
) -> None:
    path = tmp_path / "metrics.jsonl"
    before = MetricsFile(path)
    for step in (1, 2, 3):
        before.write(step, 9, {"train/loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 4, "total')  # the process was killed
    after = MetricsFile(path)
    after.write(first, 9, {key: 2.0})
    after.write(first + 1, 9, {key: 2.0})
    found = [one for one in path.read_text().splitlines() if one]
    path.write_text("".join(f"{line}\n" for line in found))
    assert lines_of(path) == [*left, (first, [key]), (first + 1, [key])]


def test_metrics_as_csv_have_one_row_per_step_and_a_column_for_each_metric() -> None:
    out = io.StringIO()
    write_csv([{"step": 1, "total_steps": 2, "time": 5.0, "a/b": 0.5}, {"step": 2, "a/b": None, "val/loss": 1.0}], out)
    assert out.getvalue() == "step,total_steps,time,a/b,val/loss\n1,2,5.0,0.5,\n2,,,,1.0\n"
