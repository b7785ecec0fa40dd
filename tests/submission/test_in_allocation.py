import subprocess
import sys

import pytest

from hpc_rl.errors import UserError
from hpc_rl.submission.in_allocation import step_environment

# What `salloc --nodes=2 --ntasks=2` set on Slurm 22.05.
SALLOC = {
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2),2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NPROCS": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "6",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "HOME": "/root",
}


def test_a_step_has_one_task_a_node_and_all_cpus() -> None:
    found = step_environment(SALLOC, 1)
    assert found["SLURM_JOB_NUM_NODES"] == "1" and found["SLURM_CPUS_PER_TASK"] == "2"
    assert not found.keys() & {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"}
    assert found["HOME"] == "/root" and found["SLURM_JOB_ID"] == "6"


def test_inside_a_job_step_srun_shares_its_resources() -> None:
    assert "SLURM_OVERLAP" not in step_environment(SALLOC, 1)
    bound = {"SLURM_STEP_ID": "0", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    found = step_environment(SALLOC | bound, 1)
    assert found["SLURM_OVERLAP"] == "1" and not [name for name in found if name.startswith("SLURM_CPU_BIND")]


def test_what_is_no_allocation_or_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="no allocation found"):
        step_environment({"HOME": "/root"}, 1)
    with pytest.raises(UserError, match="requests 3 nodes, but allocation 6 has 2"):
        step_environment(SALLOC, 3)


# In a process of its own: what is ended are all children of the process.
END = """
import subprocess, sys
from hpc_rl.submission import in_allocation

answer, in_allocation.END_S = sys.argv[1], float(sys.argv[2])
script = f"trap '{answer}' TERM; echo ready; while :; do sleep 0.05; done"
shell = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
assert shell.stdout.readline() == b"ready\\n"
in_allocation._end(shell)
print(shell.returncode)
"""


@pytest.mark.parametrize(
    ("answer", "patience_s", "expected"),
    [("exit 143", 500.0, 143), (":", 0.2, -9)],
    ids=["it ends", "it does not end"],
)
def test_a_script_that_is_ended_has_not_succeeded(answer: str, patience_s: float, expected: int) -> None:
    command = [sys.executable, "-c", END, answer, str(patience_s)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert int(ended.stdout) == expected
