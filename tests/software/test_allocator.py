from __future__ import annotations

import subprocess
import sys

import pytest

SIZE = 256 << 20
FAULTS = """
import resource
from hpc_rl.software.allocator import keep_freed_memory
if {keeps}:
    keep_freed_memory()
b"x" * {size}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
b"x" * {size}
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_an_array_gets_the_memory_of_the_one_before_it(keeps: bool) -> None:
    """Every page that is new is a minor fault, see getrusage(2)."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keeps=keeps, size=SIZE)],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    faults, large_pages = int(done.stdout), SIZE >> 21
    assert faults < 20 if keeps else faults >= large_pages
