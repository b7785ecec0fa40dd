"""Directives in the words of different clusters, and how they scale with the GPUs asked for."""

from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.local import node_command, node_environment
from hpc_rl.submission.script.render import render

PER_CPU = {"slurm.mem_option": "mem-per-cpu"}
PER_GPU = {"slurm.mem_option": "mem-per-gpu"}
NODE = {"slurm.node": {"gpus": 4, "cpus": 64, "mem_mb": 500_000}}
FIXED = ("job-name", "nodes", "ntasks-per-node", "output", "open-mode", "signal", "requeue")


def job(**settings: Any) -> Job:
    config = compose("torchrun", [], {key.replace("__", "."): value for key, value in settings.items()})
    return Job("torchrun", config, RunDir(Path("/run")), Path("/"), ("train.py",))


def asked(gpus: int = 1, **settings: Any) -> list[str]:
    """Directives that are not the same for every job."""
    text = render(job(trainer__n_gpus_per_node=gpus, **settings))
    found = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return [directive for directive in found if directive.partition("=")[0] not in FIXED]


@pytest.mark.parametrize(
    ("gpus", "settings", "directives"),
    [
        (2, {}, ["cpus-per-task=2", "gpus-per-node=2"]),
        (2, NODE, ["cpus-per-task=32", "gpus-per-node=2", "mem=250000M"]),
        (1, NODE, ["cpus-per-task=16", "gpus-per-node=1", "mem=125000M"]),
        (4, NODE, ["cpus-per-task=64", "gpus-per-node=4", "mem=0"]),
        (1, {**NODE, "slurm.exclusive": True}, ["cpus-per-task=64", "gpus-per-node=1", "mem=0", "exclusive"]),
        (2, {**NODE, "slurm.cpus_per_task": 5, "slurm.mem": "9G"}, ["cpus-per-task=5", "gpus-per-node=2", "mem=9G"]),
        (2, {**NODE, "slurm.cpus_per_gpu": 7}, ["cpus-per-task=14", "gpus-per-node=2", "mem=250000M"]),
        (2, {"slurm.gpu_option": "gres"}, ["cpus-per-task=2", "gres=gpu:2"]),
        (2, {"slurm.gpu_option": "gres", "slurm.gpu_type": "a100"}, ["cpus-per-task=2", "gres=gpu:a100:2"]),
        (2, {"slurm.gpu_type": "a100_1g.5gb"}, ["cpus-per-task=2", "gpus-per-node=a100_1g.5gb:2"]),
        (2, {"slurm.gpu_option": "gpus-per-task"}, ["cpus-per-task=2", "ntasks=1", "gpus-per-task=2"]),
        (2, {**NODE, "slurm.mem_option": "none"}, ["cpus-per-task=32", "gpus-per-node=2"]),
        (2, {**NODE, **PER_GPU}, ["cpus-per-task=32", "gpus-per-node=2", "mem-per-gpu=125000M"]),
        (4, {**NODE, **PER_GPU}, ["cpus-per-task=64", "gpus-per-node=4", "mem-per-gpu=125000M"]),
        (2, {**NODE, **PER_CPU}, ["cpus-per-task=32", "gpus-per-node=2", "mem-per-cpu=7812M"]),
        (4, {**NODE, **PER_CPU}, ["cpus-per-task=64", "gpus-per-node=4", "mem-per-cpu=7812M"]),
        (1, {**NODE, **PER_CPU, "slurm.mem": "32G"}, ["cpus-per-task=16", "gpus-per-node=1", "mem-per-cpu=2048M"]),
        (1, PER_CPU, ["cpus-per-task=1", "gpus-per-node=1"]),
        (
            2,
            {"slurm.mem": "1G", "slurm.mem_option": "mem-per-gpu"},
            ["cpus-per-task=2", "gpus-per-node=2", "mem-per-gpu=512M"],
        ),
        (2, {**NODE, "trainer.device": "cpu"}, ["cpus-per-task=2", "mem=15625M"]),
        (
            2,
            {"slurm.gpu_option": "gres", "slurm.sbatch": {"gres": "nvme:1"}},
            ["cpus-per-task=2", "gres=gpu:2,nvme:1"],
        ),
        (2, {"trainer.device": "npu", "slurm.sbatch": {"gres": "npu:2"}}, ["cpus-per-task=2", "gres=npu:2"]),
        (2, {"slurm.sbatch": {"gres": "nvme:1"}}, ["cpus-per-task=2", "gpus-per-node=2", "gres=nvme:1"]),
        (
            2,
            {"slurm.gpu_option": "gres", "slurm.sbatch": {"gres": "gpu:v100:2"}},
            ["cpus-per-task=2", "gres=gpu:v100:2"],
        ),
        (2, {**NODE, "slurm.sbatch": {"mem-per-cpu": "2G"}}, ["cpus-per-task=32", "gpus-per-node=2", "mem-per-cpu=2G"]),
        (2, {"slurm.exclusive": True, "slurm.sbatch": {"exclusive": "user"}},
         ["cpus-per-task=2", "gpus-per-node=2", "mem=0", "exclusive=user"]),
        (2, {"slurm.leave_out": ["cpus-per-task", "gpus-per-node"]}, []),
    ],
)  # fmt: skip
def test_directives(gpus: int, settings: dict[str, Any], directives: list[str]) -> None:
    assert asked(gpus, **settings) == directives


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slurm.mem": "64G", "slurm.mem_option": "none"}, "leave mem out"),
        ({"slurm.mem": "0", "slurm.mem_option": "mem-per-gpu"}, "write a size, such as 64G"),
        ({"slurm.gpu_type": "a100:4"}, "slurm.gpu_type"),
        ({"slurm.leave_out": ["nodes"]}, "slurm.leave_out.0"),
    ],
)
def test_what_cannot_be_asked_for(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        job(**settings)


def test_directives_left_out_are_not_in_the_script() -> None:
    text = render(job(**{"slurm.leave_out": ["requeue", "signal", "open-mode"]}))
    assert "#SBATCH --output" in text
    assert not any(f"#SBATCH --{name}" in text for name in ("requeue", "signal", "open-mode"))


def test_a_local_run_has_the_same_variables_and_cpus() -> None:
    found = job(**NODE, **{"trainer.n_gpus_per_node": 2, "slurm.proxy": "http://p:1", "slurm.env": {"no_proxy": "x"}})
    environ = node_environment(found, "1", Path("/run/attempt-1"), 0, {}, cpus=4)
    assert (environ["http_proxy"], environ["https_proxy"], environ["no_proxy"]) == ("http://p:1", "http://p:1", "x")
    assert environ["SLURM_CPUS_ON_NODE"] == "32"


def test_a_local_run_needs_no_network_of_the_cluster() -> None:
    found = job(**{"slurm.interface": "ib0"})
    assert "--interface ib0" in render(found) and "--interface" not in node_command(found, Path("attempt-1"))


def test_a_part_of_a_node_is_exact() -> None:
    found = job(**{"trainer.n_gpus_per_node": 7, "slurm.node.gpus": 10, "slurm.node.cpus": 90})
    assert "#SBATCH --cpus-per-task=63\n" in render(found)
