"""Options of every job: processes, Slurm, caches and the container. `submit torchrun` has no others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Path, Section
from hpc_rl.config.container import ContainerConfig
from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.system.accelerators import DeviceName


class TrainerConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Number of nodes. Same as --nodes."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Processes per node: one for each GPU, or CPU processes. Same as --gpus-per-node. If not given: the number of GPUs
    per node in the site profile or the partition, otherwise 1."""
    device: Literal["auto", "cuda", "npu", "xpu", "cpu"] = "auto"
    """Device of the processes, by torch's name: cuda (NVIDIA, and AMD with ROCm), xpu (Intel), npu (Huawei Ascend).
    auto: GPUs if the nodes have them, otherwise CPUs. cpu: the job requests no GPUs."""
    hang_timeout_s: float = Field(3600, ge=0)
    """If at any time after the first step of your own program a process has no heartbeat for so many seconds, the job
    ends and is queued again once. Some adapters record heartbeats (docs/other-programs.md). 0: no limit."""

    @property
    def uses_gpus(self) -> bool:
        """Whether the job requests GPUs. An open `auto` counts as a request for them."""
        return self.device != "cpu"

    @property
    def computes_on(self) -> DeviceName:
        """The device of the job; an open `auto` counts as cuda."""
        return "cuda" if self.device == "auto" else self.device


class CacheConfig(Section):
    hf_home: Path | None = None
    """Folder of the Hugging Face cache (HF_HOME), on a file system that all nodes share. null: as in the environment of
    the submitting shell."""
    wandb_dir: Path | None = None
    """Folder of wandb's own cache, for home folders with a small quota. null: wandb's default."""
    data_dir: Path | None = None
    """Folder for tokenized data. Runs map its files into memory, and later runs use them again. Other users must not
    have permission to write to it. null: the folder .tokenized-UID beside the run, or beside its sweep or pipeline,
    with your user id."""
    offline: bool = False
    """Set to true if compute nodes have no internet access. Models and data sets then come from the cache, which
    `hpc-rl fetch` fills, and wandb writes into the run directory."""


class JobConfig(Section):
    """Options that the launcher reads for any job. `submit torchrun` uses this class unchanged."""

    trainer: TrainerConfig = TrainerConfig()
    slurm: SlurmConfig = SlurmConfig()
    cache: CacheConfig = CacheConfig()
    container: ContainerConfig = ContainerConfig()

    @property
    def hang_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a process hangs; 0 for no limit."""
        return self.trainer.hang_timeout_s
