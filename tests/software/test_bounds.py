from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading

import pytest

from hpc_rl.software.bounds import cpu_seconds, more_memory

MATH = """
import resource
from hpc_rl.rewards import math
math.MEMORY_BYTES = 64 << 20
math.score(r"\\boxed{7}", "7")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(math.score(r"\\boxed{2^{2^{32}}}", "7"))
except MemoryError:
    print(0.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10)
print(math.score(r"\\boxed{7}", "7"))
"""
"""A number of 512 MB in a response of 14 characters."""


def test_a_block_that_computes_too_long_is_interrupted() -> None:
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TimeoutError, match=r"^it computed for more than 0\.1 s$"), cpu_seconds(0.1, "it"):
        while True:
            pass
    assert signal.getsignal(signal.SIGVTALRM) == handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_other_blocks_are_not() -> None:
    with cpu_seconds(0.01, "it"):
        pass
    sum(range(3_000_000))  # longer than the limit
    done = []

    def elsewhere() -> None:
        with cpu_seconds(0.01, "it"):
            done.append(sum(range(3_000_000)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done


def test_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), more_memory(64 << 20):
        bytearray(256 << 20)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with more_memory(256 << 20):
        bytearray(64 << 20)


def test_mathematics_has_a_memory_limit() -> None:
    done = subprocess.run([sys.executable, "-c", MATH], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split() == ["0.0", "True", "1.0"], done.stderr
