import subprocess

import pytest

from hpc_rl.errors import UserError
from hpc_rl.submission import in_allocation
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


def test_what_is_no_allocation_or_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="no allocation found"):
        step_environment({"HOME": "/root"}, 1)
    with pytest.raises(UserError, match="requests 3 nodes, but allocation 6 has 2"):
        step_environment(SALLOC, 3)


@pytest.mark.parametrize(
    ("answer", "patience_s", "expected"),
    [("exit 143", 600.0, 143), (":", 0.2, -9)],
    ids=["it ends", "it does not end"],
)
def test_a_script_that_is_ended_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, answer: str, patience_s: float, expected: int
) -> None:
    monkeypatch.setattr(in_allocation, "END_S", patience_s)
    script = f"trap '{answer}' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == b"ready\n"
        in_allocation._end(shell)
    assert shell.returncode == expected
