"""JSON that a damaged disk, another program or another user may have written: what has the wrong type is left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

_LARGEST = 1e100
"""Sums and products of smaller numbers are finite."""
_LATEST = 253_402_300_800
"""The year 10000 in Unix seconds, at which Python's dates end."""
_LARGEST_INTEGER = 2**53

_JOB_ID = re.compile(r"(?a:\w[\w.+-]{0,63})")

Check = Callable[[Any], bool]


def object_of(text: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is another value, incomplete, or nested too deeply."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number of a reasonable size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_INTEGER


def is_count(value: Any) -> bool:
    return is_integer(value) and value >= 0


def is_time(value: Any) -> bool:
    """Return whether a value is a time in Unix seconds."""
    return is_number(value) and math.isfinite(value) and 0 <= value < _LATEST


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_job_id(value: Any) -> bool:
    """Return whether a value can be the id of a job. Names of files are made of it."""
    return isinstance(value, str) and _JOB_ID.fullmatch(value) is not None


def well_typed(record: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return a record without the values that have the wrong type. Keys without a check stay."""
    return {key: value for key, value in record.items() if key not in checks or checks[key](value)}


JOB: Mapping[str, Check] = {
    **dict.fromkeys(("kind", "submitted", "host", "nodes", "working_dir", "after", "lends_to"), is_text),
    **dict.fromkeys(("pid", "start_time"), is_count),
    "job_id": is_job_id,
}
"""Values of job.json that are read."""
STATUS: Mapping[str, Check] = {
    "job_id": lambda value: value is None or is_job_id(value),
    "state": lambda value: isinstance(value, str) and re.fullmatch(r"[A-Z_]{1,40}", value) is not None,
    "attempt": is_count,
    "exit_code": lambda value: value is None or is_integer(value),
}
"""Values of status.json."""
