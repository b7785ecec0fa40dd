from __future__ import annotations

from hpc_rl.software.environment import openmp_defaults


def test_a_process_has_at_least_one_thread() -> None:
    assert [openmp_defaults(threads)["OMP_NUM_THREADS"] for threads in (0, 1, 8)] == ["1", "1", "8"]
