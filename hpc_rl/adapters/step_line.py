"""The line that a hook inside a program prints for each step, where the program's own log is not for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hpc_rl.adapters.adapter import ReportedStep

_LINE = re.compile(r"hpc-rl: step (\d+)(?: of (\d+))?: (\{.*\})")


def step_line(step: int, total: int | None, values: Mapping[str, Any]) -> str:
    """Return the line of a step, with those of its values that are numbers."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return f"hpc-rl: step {step}{f' of {total}' if total else ''}: {json.dumps(numbers)}"


def read_step_line(line: str, names: Mapping[str, str], groups: Mapping[str, str]) -> ReportedStep | None:
    """Read the line again.

    Args:
        names: name of the program's -> ours.
        groups: first part of its names, with the `/` -> ours. Names of other groups are kept.
    """
    if (match := _LINE.search(line)) is None:
        return None
    try:
        values = json.loads(match[3])
    except ValueError:
        return None
    found = {}
    for name, value in values.items():
        group = next((group for group in groups if name.startswith(group)), "")
        found[names.get(name, f"{groups.get(group, '')}{name.removeprefix(group)}")] = value
    return ReportedStep(int(match[1]), int(match[2]) if match[2] else None, found)
