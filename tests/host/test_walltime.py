"""The end of the walltime, as the job script gives it."""

from __future__ import annotations

import pytest

from hpc_rl.host.walltime import job_end


@pytest.mark.parametrize("text, end", [("1700000000", 1.7e9), ("", None), ("N/A", None), (" 17\n", 17.0)])
def test_the_end_of_the_job(text: str, end: float | None) -> None:
    assert job_end({"HPC_RL_JOB_END": text}) == end
    assert job_end({}) is None
