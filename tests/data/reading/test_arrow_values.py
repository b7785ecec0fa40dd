"""Rows of tables mean what their author wrote."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hpc_rl.data.reading.arrow_values import as_written
from hpc_rl.data.reading.formats import read_rows
from hpc_rl.data.reading.sources import all_rows

datasets = pytest.importorskip("datasets")
if not hasattr(datasets, "Json"):
    pytest.skip("this version of datasets has no type for JSON", allow_module_level=True)
from datasets import Dataset, Features, Json, List, Value  # noqa: E402

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"city": "Bonn"}}}
ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"city": {"a": 1}}}}}],
        "extra": {"index": 1},
    },
    {
        "messages": [
            {"role": "user", "content": "?", "name": "Ann"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "x", "tool_call_id": "a"},
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "g", "arguments": {"day": 3}}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "g", "parameters": {"properties": {"day": {"b": "x"}}}}}],
        "extra": {"answer": [1, None]},
    },
]


def stored(table: pa.Table, folder: Path) -> list[dict[str, Any]]:
    parquet.write_table(table, folder / "rows.parquet")
    return list(read_rows(folder / "rows.parquet"))


def test_rows_are_the_same_as_json_lines_and_as_parquet(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert list(read_rows(tmp_path / "rows.jsonl")) == ROWS
    assert stored(pa.Table.from_pylist(ROWS), tmp_path) == ROWS


def test_rows_are_the_same_in_a_data_set_of_datasets(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "train.parquet")
    assert [row for row, _ in all_rows([str(tmp_path / "data")], "train")] == ROWS


def test_columns_of_json_are_read(tmp_path: Path) -> None:
    """`datasets` stores values of different types as JSON, where null is what the author wrote."""
    rows = [{"tools": [{"a": 1, "b": None}], "text": '{"a": 1}'}, {"tools": [{"a": "x"}], "text": "y"}]
    features = Features({"tools": List(Json()), "text": Value("string")})
    (tmp_path / "data").mkdir()
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "data" / "train.parquet")
    assert list(read_rows(tmp_path / "data" / "train.parquet")) == rows
    assert [row for row, _ in all_rows([str(tmp_path / "data")], "train")] == rows


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": None}, {"a": 1, "b": None}),
        (pa.map_(pa.string(), pa.struct({"x": pa.int8(), "y": pa.int8()})), {"a": {"x": 1}}, {"a": {"x": 1}}),
        (pa.list_(pa.map_(pa.string(), pa.string())), [{}, {"a": "b"}], [{}, {"a": "b"}]),
        (pa.struct({"a": pa.list_(pa.struct({"b": pa.int8()}))}), {"a": [{"b": None}, None]}, {"a": [{}, None]}),
        (pa.large_list(pa.large_string()), ["a", None], ["a", None]),
        (pa.list_(pa.decimal128(5, 2), 2), [Decimal("5.00"), Decimal("0.25")], [5, 0.25]),
        (pa.decimal128(30, 20), Decimal("0.12345678901234567890"), "0.12345678901234567890"),
        (pa.timestamp("s"), datetime(2024, 5, 1, 12, 30), "2024-05-01T12:30:00"),
        (pa.timestamp("us"), datetime(2024, 5, 1), "2024-05-01T00:00:00"),
        (pa.timestamp("s", "UTC"), datetime(2024, 5, 1, tzinfo=UTC), "2024-05-01T00:00:00+00:00"),
        (pa.struct({"when": pa.timestamp("ns")}), {"when": datetime(2024, 5, 1)}, {"when": "2024-05-01T00:00:00"}),
        (pa.date32(), date(2024, 5, 1), "2024-05-01"),
        (pa.time64("us"), time(1, 2, 3), "01:02:03"),
        (pa.duration("s"), timedelta(minutes=2), 120.0),
        (pa.dictionary(pa.int8(), pa.string()), "red", "red"),
        (pa.list_(pa.float32()), [0.5], [0.5]),
        (pa.bool_(), False, False),
    ],
)
def test_values_of_arrow_types(tmp_path: Path, kind: pa.DataType, value: Any, expected: Any) -> None:
    given = list(value.items()) if pa.types.is_map(kind) else value
    if pa.types.is_list(kind) and pa.types.is_map(kind.value_type):
        given = [list(one.items()) for one in value]
    array = pa.array([given, None], kind)
    found = stored(pa.table({"x": array}), tmp_path)
    assert found == [{"x": expected}, {"x": None}]
    assert json.loads(json.dumps(found)) == found and type(found[0]["x"]) is type(expected)


def test_values_of_an_unknown_type() -> None:
    given = {"a": None, "b": [{"c": None, "d": date(2024, 5, 1)}, None], "e": Decimal(3), "f": b"x"}
    assert as_written(given) == {"b": [{"d": "2024-05-01"}, None], "e": 3, "f": b"x"}
