"""The filter as a program, run here by an interpreter of its instructions, for both machines."""

from __future__ import annotations

import pytest

from hpc_rl.environments.kernel_filter import Filter, filter_for

ALLOW, FAIL = 0x7FFF0000, 0x00050026
X86, ARM = 0xC000003E, 0xC00000B7


def outcome(found: Filter, call: int, architecture: int, argument: int = 0) -> int:
    """Return what the kernel would do with a call."""
    data = {0: call, 4: architecture, 24: argument}
    codes, place, value = found.instructions(), 0, 0
    while True:
        code, yes, no, operand = codes[place]
        place += 1
        if code == 0x20:
            value = data[operand]
        elif code == 0x06:
            return operand
        else:
            place += yes if (value == operand if code == 0x15 else value >= operand) else no


@pytest.mark.parametrize(
    ("machine", "architecture", "refused", "allowed", "fcntl"),
    [
        ("x86_64", X86, (29, 64, 68, 240, 248, 249, 250, 253, 294, 298, 300, 319, 321, 323, 425, 447), (0, 59, 57), 72),
        ("aarch64", ARM, (26, 180, 186, 190, 194, 217, 218, 219, 241, 262, 279, 280, 282, 425, 447), (63, 221, 29), 25),
    ],
)
def test_what_is_refused(
    machine: str, architecture: int, refused: tuple[int, ...], allowed: tuple[int, ...], fcntl: int
) -> None:
    found = filter_for(machine)
    assert found is not None
    results = {call: outcome(found, call, architecture) for call in range(500)}
    assert tuple(call for call, result in results.items() if result != ALLOW) == refused
    assert {results[call] for call in refused} == {FAIL} and {results[call] for call in allowed} == {ALLOW}
    assert outcome(found, fcntl, architecture, 1031) == FAIL and outcome(found, fcntl, architecture, 1032) == ALLOW
    assert outcome(found, allowed[0], 0x40000003) == FAIL, "a call of another architecture"
    assert outcome(found, 0x40000000, architecture) == FAIL and outcome(found, 0x3FFFFFFF, architecture) == ALLOW


def test_other_machines_have_none() -> None:
    assert filter_for("ppc64le") is None
