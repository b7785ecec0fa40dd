import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.run_dir import outcome_file
from tests.small_disk import needs_root, small_disk

PROGRAM = """
import os, signal, sys
from hpc_rl.node.entry import run_with_others

code = run_with_others(lambda allocation, rendezvous: int(os.environ.get("CODE", 75)))
if code == 2:
    sys.exit(code)
os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does when another node has ended first
sys.exit(code)
"""


@pytest.mark.parametrize(("code", "agreed", "left"), [(75, None, 75), (75, 75, 0), (75, 1, 75), (1, 75, 1), (0, 75, 0)])
def test_a_saved_run_leaves_srun_without_an_error_if_the_script_finds_its_code(
    tmp_path: Path, code: int, agreed: int | None, left: int
) -> None:
    """Slurm's signal at the end does not replace the exit code."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}
    attempt = tmp_path / "attempt-1"
    attempt.mkdir()
    if agreed is not None:
        outcome_file(attempt).write_text(f"{agreed}\n")
    environ = {**os.environ, **slurm, "HPC_RL_ATTEMPT_DIR": str(attempt), "CODE": str(code)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, timeout=600, check=False)
    assert ended.returncode == left


@needs_root
@pytest.mark.parametrize("full", ["temporary", "run"])
def test_a_full_disk_of_a_node_is_named_before_anything_starts(tmp_path: Path, full: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        attempt, temporary = tmp_path / "attempt-1", tmp_path / "tmp"
        for folder in (attempt, temporary):
            folder.mkdir()
        disk.fill()
        places = {"HPC_RL_ATTEMPT_DIR": str(attempt), "TMPDIR": str(temporary)}
        places["TMPDIR" if full == "temporary" else "HPC_RL_ATTEMPT_DIR"] = str(disk.path)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **slurm, **places},
            timeout=600,
            check=False,
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"hpc-rl: the {full}") and "of node localhost is not writable" in line
    assert f"No space left on device: file system {tmp_path}/disk (tmpfs) has 0 bytes" in line
