"""JSON whose values may have any type."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.formats.typed_json import (
    JOB,
    STATUS,
    is_count,
    is_integer,
    is_job_id,
    is_number,
    is_time,
    object_of,
    well_typed,
)


@pytest.mark.parametrize(
    "text", ["", "[]", "1", '{"a": 1', '{"a": ' + "[" * 100_000, b"\xff", '{"a": ' + "1" * 5000 + "}"]
)
def test_only_an_object_is_one(text: str | bytes) -> None:
    assert object_of(text) is None
    assert object_of('{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (is_number, [0, -1.5, 1e99], [True, "1", None, [], 1e100, 10**300, float("nan"), float("inf")]),
        (is_integer, [0, -1, 2**53 - 1], [True, 1.0, "1", 2**53, -(2**53)]),
        (is_count, [0, 7], [-1, False, 1.0]),
        (is_time, [0, 1.7e9], [-1, 253_402_300_800, float("nan"), "0"]),
        (
            is_job_id,
            ["7", "7_12", "local-9", "a.b+c", "x" * 64],
            ["", "-7", "../x", "a/b", "7,8", "x" * 65, "ü", 7, "7\n"],
        ),
    ],
)
def test_what_a_value_can_be(check: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not check(value)] == [value for value in wrong if check(value)] == []


def test_values_of_another_type_are_left_out() -> None:
    assert well_typed({"job_id": "7", "pid": "x", "kind": 3, "other": []}, JOB) == {"job_id": "7", "other": []}
    right = {"job_id": None, "state": "OUT_OF_MEMORY", "attempt": 1, "exit_code": None}
    assert well_typed(right, STATUS) == right
    assert well_typed({"job_id": "/", "state": "done\x1b", "attempt": -1, "exit_code": "1"}, STATUS) == {}
