from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.node.ray_cluster.limits import ray_resources
from hpc_rl.slurm.allocation import Allocation

ALONE = Allocation("7", 0, ("a", "b"), 0, cpus=8)
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 64 GiB, and a job in a cgroup v1 hierarchy like those of Slurm."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       67108864 kB\nMemFree:  1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/slurm/job_7/step_0\n3:cpu,cpuacct:/slurm/job_7\n0::/\n")
    (tmp_path / "cg/memory/slurm/job_7/step_0").mkdir(parents=True)
    (tmp_path / "cg/cpu/slurm/job_7").mkdir(parents=True)
    return tmp_path


def grant(
    machine: Path, allocation: Allocation = ALONE, environ: dict[str, str] | None = None, **wanted: int
) -> list[int]:
    found = ray_resources(
        allocation, environ or {}, cgroups=machine / "cg", proc=machine / "proc", shm=machine, **wanted
    )
    return [found.cpus, found.gpus, found.memory, found.object_store]


def test_memory_is_the_smallest_limit_and_the_object_store_a_part_of_it(machine: Path) -> None:
    assert sum(grant(machine)[2:]) == 64 * GIB
    assert sum(grant(machine, environ={"SLURM_MEM_PER_NODE": "20480"})[2:]) == 20 * GIB
    assert sum(grant(machine, environ={"SLURM_MEM_PER_CPU": "1024"})[2:]) == 8 * GIB
    (machine / "cg/memory/slurm/job_7/memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (machine / "cg/memory/slurm/job_7/step_0/memory.limit_in_bytes").write_text("9223372036854771712\n")
    cpus, _, memory, store = grant(machine, environ={"SLURM_MEM_PER_NODE": "20480"})
    assert (cpus, memory + store, store) == (8, 4 * GIB, int(0.3 * 4 * GIB))


def test_cgroup_v2(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/system.slice/job_7\n")
    (machine / "cg/system.slice/job_7").mkdir(parents=True)
    (machine / "cg/system.slice/job_7/memory.max").write_text(f"{2 * GIB}\n")
    (machine / "cg/system.slice/memory.max").write_text("max\n")
    (machine / "cg/system.slice/cpu.max").write_text("250000 100000\n")
    assert grant(machine)[0] == 2
    assert sum(grant(machine)[2:]) == 2 * GIB


def test_cpus_are_the_smallest_limit(machine: Path) -> None:
    assert grant(machine, most_cpus=3)[0] == 3
    assert grant(machine, most_cpus=300)[0] == 8
    (machine / "cg/cpu/slurm/job_7/cpu.cfs_quota_us").write_text("150000\n")
    (machine / "cg/cpu/slurm/job_7/cpu.cfs_period_us").write_text("100000\n")
    assert grant(machine)[0] == 1


def test_nodes_on_one_machine_share_it(machine: Path) -> None:
    local = Allocation("local-7", 0, ("a", "a"), 1, cpus=4)
    assert sum(grant(machine, local)[2:]) == 32 * GIB


def test_an_object_store_of_the_users_size_and_one_that_does_not_fit(machine: Path) -> None:
    assert grant(machine, object_store=GIB)[3] == GIB
    with pytest.raises(UserError, match=r"at least 80,000,000.*set ray\.object_store_gb"):
        grant(machine, environ={"SLURM_MEM_PER_NODE": "100"})


def test_gpus_are_those_that_slurm_granted(machine: Path) -> None:
    assert grant(machine, environ={"SLURM_GPUS_ON_NODE": "4"})[1] == 0
    assert grant(machine, environ={"SLURM_GPUS_ON_NODE": "4"}, gpus=2)[1] == 4
    assert grant(machine, environ={"CUDA_VISIBLE_DEVICES": "4,5"}, gpus=2)[1] == 2
    assert grant(machine, gpus=2)[1] == 2
    with pytest.raises(UserError, match=r"node a grants 1 GPU, and trainer\.n_gpus_per_node is 2"):
        grant(machine, environ={"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, gpus=2)
