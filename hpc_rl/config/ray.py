"""Options of Ray inside a job: the only further options of `submit ray`, and some of those of `submit ppo`."""

from __future__ import annotations

from pydantic import Field, field_validator

from hpc_rl.config.base import Path, Section, Table
from hpc_rl.config.job import JobConfig


class RayConfig(Section):
    start_timeout_s: int = Field(300, ge=1)
    """Deadline in seconds for all nodes to join the Ray cluster, and again for Ray to reserve their GPUs. In a job,
    each worker of Ray has the same time to start."""
    dashboard: bool = False
    """Start Ray's dashboard on the loopback interface of the first node. The log shows how to connect to it."""
    object_store_gb: float | None = Field(None, gt=0)
    """Shared memory for Ray's objects on each node, in 10^9 bytes. null: 30 % of the memory that the job has there."""
    first_port: int | None = Field(None, ge=1024, le=65024)
    """First of the 512 consecutive ports that Ray uses on each node, for sites with a firewall. null: free
    ports in random places below the kernel's ephemeral range."""

    @property
    def object_store_bytes(self) -> int | None:
        return None if self.object_store_gb is None else int(self.object_store_gb * 10**9)


class RayKwargs(Section):
    ray_init: Table = {}
    """Arguments of ray.init. Of these, num_cpus limits the CPUs that Ray may use on each node."""
    timeline_json_file: Path | None = None
    """File for Ray's timeline of all tasks, written at the end, for chrome://tracing or Perfetto. null: none."""

    @field_validator("ray_init")
    @classmethod
    def _whole_cpus(cls, value: Table) -> Table:
        cpus = value.get("num_cpus")
        if cpus is not None and (not isinstance(cpus, int) or isinstance(cpus, bool) or cpus < 1):
            raise ValueError(f"num_cpus is {cpus!r}; expected a whole number of CPUs, at least 1")
        return value

    @property
    def num_cpus(self) -> int | None:
        """Most CPUs that Ray may use on a node."""
        found: int | None = self.ray_init.get("num_cpus")
        return found


class RayJobConfig(JobConfig):
    """Options of `submit ray`, which runs any program on a Ray cluster inside the job."""

    ray: RayConfig = RayConfig()
    ray_kwargs: RayKwargs = RayKwargs()
