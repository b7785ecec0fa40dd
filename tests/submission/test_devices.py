from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.slurm import commands
from hpc_rl.slurm.cluster import NodeGroup
from hpc_rl.slurm.place import Place
from hpc_rl.submission.devices import Devices

GPU = NodeGroup("gpu", 10, 64, 500_000, {"a100": 4}, is_default=True)
PLAIN = NodeGroup("gpu", 12, 16, 100_000, {}, is_default=True, features=("big",))
FAT = NodeGroup("gpu", 2, 128, 900_000, {"a100": 8}, is_default=True)
SHAPE = {"slurm.node.gpus": 4, "slurm.node.cpus": 64}
CPU = NodeGroup("cpu", 50, 32, 100_000, {})


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cluster of two partitions; counts how often it is asked."""
    asked: list[int] = []

    def groups(_place: Place) -> list[NodeGroup]:
        asked.append(1)
        return [CPU, FAT, PLAIN, GPU]

    monkeypatch.setattr(commands, "available", lambda: True)
    monkeypatch.setattr(commands, "node_groups", groups)
    return asked


@pytest.mark.parametrize(
    ("tree", "filled"),
    [
        ({}, {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4, "slurm.node.gpus": 4, "slurm.node.cpus": 64}),
        ({"slurm": {"partition": "cpu"}}, {"trainer.device": "cpu"}),
        ({"trainer": {"device": "cpu"}}, {}),
        (
            {"trainer": {"device": "xpu"}},
            {"trainer.device": "xpu", "trainer.n_gpus_per_node": 4, "slurm.node.gpus": 4, "slurm.node.cpus": 64},
        ),
        (
            {"trainer": {"n_gpus_per_node": 2}},
            {"trainer.device": "cuda", "slurm.node.gpus": 4, "slurm.node.cpus": 64},
        ),
        (
            {"slurm": {"node": {"gpus": 6}, "partition": "cpu"}},
            {"trainer.device": "cuda", "trainer.n_gpus_per_node": 6},
        ),
        ({"slurm": {"node": {"gpus": 0}}}, {"trainer.device": "cpu"}),
        (
            {"slurm": {"node": {"gpus": 4}}},
            {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4, "slurm.node.cpus": 64},
        ),
        (
            {"slurm": {"node": {"gpus": 4}, "cpus_per_gpu": 3}},
            {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4},
        ),
        (
            {"trainer": {"n_gpus_per_node": 8}},
            {"trainer.device": "cuda", "slurm.node.gpus": 8, "slurm.node.cpus": 128},
        ),
        (
            {"trainer": {"n_gpus_per_node": 8}, "slurm": {"node": {"gpus": 4, "cpus": 64, "mem_mb": 500_000}}},
            {"trainer.device": "cuda", "slurm.node.gpus": 8, "slurm.node.cpus": 128, "slurm.node.mem_mb": 900_000},
        ),
        (
            {"trainer": {"n_gpus_per_node": 16}, "slurm": {"node": {"gpus": 4, "cpus": 64}}},
            {"trainer.device": "cuda"},
        ),
        ({"slurm": {"node": None}}, {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4, **SHAPE}),
        ({"slurm": {"partition": "unknown"}}, {"trainer.device": "cuda"}),
        ({"slurm": {"partition": "cpu", "gpu_type": "a100"}}, {"trainer.device": "cuda"}),
        ({"slurm": {"partition": "cpu", "sbatch": {"gres": "gpu:2"}}}, {"trainer.device": "cuda"}),
        (
            {"trainer": {"device": "npu"}, "slurm": {"partition": "cpu", "sbatch": {"gres": "npu:2"}}},
            {"trainer.device": "npu"},
        ),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_what_is_left_open_is_what_a_node_of_the_partition_has(tree: Mapping[str, Any], filled: dict[str, Any]) -> None:
    assert Devices().fill_in(tree) == filled


def test_a_partition_is_looked_at_once_for_all_points_of_a_sweep(slurm: list[int]) -> None:
    devices = Devices()
    for _ in range(5):
        devices.fill_in({})
    assert len(slurm) == 1


def test_what_was_chosen_is_told(slurm: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    devices.fill_in({})
    assert devices.note == ""
    devices.fill_in({"slurm": {"partition": "cpu"}})
    assert devices.note == "trainer.device=auto: no GPUs found, so the job runs on CPUs"
    monkeypatch.setattr(commands, "available", lambda: False)
    unknown = Devices()
    assert unknown.fill_in({}) == {"trainer.device": "cuda"}
    cpus = "the number of CPUs per node is unknown, so the job requests one per GPU"
    assert "the job requests 1 per node" in unknown.note and cpus in unknown.note
    for slurm_table in (
        {"cpus_per_gpu": 8},
        {"cpus_per_task": 8},
        {"node": {"cpus": 64}},
        {"sbatch": {"cpus-per-gpu": 8}},
        {"leave_out": ["cpus-per-task"]},
    ):
        unknown.fill_in({"slurm": slurm_table})
        assert "CPUs" not in unknown.note
    for device in ("cuda", "auto"):
        unknown.fill_in({"trainer": {"device": device, "n_gpus_per_node": 2}})
        assert unknown.note.startswith(cpus)


def smi(folder: Path, gpus: int) -> str:
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {n}: NVIDIA A100 (UUID: x)'\n" for n in range(gpus)))
    program.chmod(0o755)
    return str(folder)


def test_nodes_of_a_local_job_share_the_machines_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", smi(tmp_path, 4))
    assert Devices(local=True).fill_in({})["trainer.n_gpus_per_node"] == 4
    assert Devices(local=True).fill_in({"trainer": {"nnodes": 2}})["trainer.n_gpus_per_node"] == 2
    assert Devices(local=True).fill_in({"trainer": {"nnodes": 8}})["trainer.n_gpus_per_node"] == 1
    monkeypatch.setenv("PATH", smi(tmp_path, 0))
    assert Devices(local=True).fill_in({}) == {"trainer.device": "cpu"}
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    assert Devices(local=True).fill_in({}) == {"trainer.device": "npu", "trainer.n_gpus_per_node": 2}
