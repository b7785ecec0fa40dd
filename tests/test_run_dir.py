"""The run directory: the order of attempts, and status.json, which the job script and Python both write."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.submission.script.render import support_text


def test_attempts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("attempt-10", "attempt-2", "attempt-x", "attempt-2.old"):
        (tmp_path / name).mkdir()
    assert [path.name for path in RunDir(tmp_path).attempts()] == ["attempt-2", "attempt-10"]


@pytest.mark.parametrize("mark", ["sweep.json", "pipeline.json"])
def test_tokenized_data_is_beside_the_runs_and_their_sets(tmp_path: Path, mark: str) -> None:
    assert RunDir(tmp_path / "runs" / "a").tokenized == tmp_path / "runs" / f".tokenized-{os.getuid()}"
    (tmp_path / "runs" / "set").mkdir(parents=True)
    (tmp_path / "runs" / "set" / mark).touch()
    assert RunDir(tmp_path / "runs" / "set" / "set_1").tokenized == tmp_path / "runs" / f".tokenized-{os.getuid()}"


@pytest.mark.parametrize(("state", "code"), [("RUNNING", None), ("COMPLETED", 0), ("STOPPED", 75)])
def test_the_job_script_writes_the_same_status(tmp_path: Path, state: str, code: int | None) -> None:
    run = RunDir(tmp_path)
    run.write_status("12_3", 2, state, code)
    by_python = run.status.read_text()
    run.status.unlink()
    functions = re.findall(
        r"^(?:replace|is_latest|report)\(\) \{.*?\}\n(?=\S|\n)", support_text(), re.DOTALL | re.MULTILINE
    )
    assert len(functions) == 3
    given = "null" if code is None else code
    script = f"HPC_RL_RUN_DIR={tmp_path} SLURM_JOB_ID=15 job=12_3 attempt=2\n{''.join(functions)}report {state} {given}"
    subprocess.run(["bash", "-euc", script], check=True, timeout=600)
    assert run.status.read_text() == by_python
