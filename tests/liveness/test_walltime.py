"""The end of the walltime, as the job script gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.liveness.walltime import job_end


@pytest.mark.parametrize("text, end", [("1700000000", 1.7e9), ("", None), ("N/A", None), (" 17\n", 17.0)])
def test_the_end_of_the_job(tmp_path: Path, text: str, end: float | None) -> None:
    assert job_end({"HPC_RL_JOB_END": text}, tmp_path / "none")() == end
    assert job_end({}, tmp_path / "none")() is None


def test_an_end_that_has_moved(tmp_path: Path) -> None:
    end = job_end({"HPC_RL_JOB_END": "17"}, tmp_path / ".job-end")
    assert end() == 17
    (tmp_path / ".job-end").write_text("20\n")
    assert end() == 20
