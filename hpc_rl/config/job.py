"""Options of every job: processes, Slurm, caches and the container. `submit torchrun` has no others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Path, Section
from hpc_rl.config.container import ContainerConfig
from hpc_rl.config.slurm import SlurmConfig


class TrainerConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the job (--nodes)."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Processes per node: one for each GPU, or CPU processes (--gpus-per-node). If not given: all GPUs of a node, if
    the site profile or the partition says how many there are."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What the processes compute on. auto: GPUs if the nodes have them, else CPUs. cpu: no GPUs are requested."""

    @property
    def uses_gpus(self) -> bool:
        """Whether the job requests GPUs. An open `auto` counts as a request for them."""
        return self.device != "cpu"


class CacheConfig(Section):
    hf_home: Path | None = None
    """Folder of the Hugging Face cache (HF_HOME), which all nodes see; as in the environment where null."""
    wandb_dir: Path | None = None
    """Folder of wandb's own cache, for home folders with a small quota; wandb's default where null."""
    offline: bool = False
    """Compute nodes have no internet: models and data sets come from the cache, where `hpc-rl fetch` puts them, and
    wandb writes into the run directory."""


class JobConfig(Section):
    """What the launcher needs of any job; `submit torchrun` uses it as it is."""

    trainer: TrainerConfig = TrainerConfig()
    slurm: SlurmConfig = SlurmConfig()
    cache: CacheConfig = CacheConfig()
    container: ContainerConfig = ContainerConfig()
