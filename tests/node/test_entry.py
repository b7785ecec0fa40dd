import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from hpc_rl.node.entry import run_with_others

code = run_with_others(lambda allocation, meeting: 75)
os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does when another node has ended first
sys.exit(code)
"""


def test_slurms_signal_at_the_end_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}
    attempt = tmp_path / "attempt-1"
    attempt.mkdir()
    environ = {**os.environ, **slurm, "HPC_RL_ATTEMPT_DIR": str(attempt)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, timeout=120, check=False)
    assert ended.returncode == 75
