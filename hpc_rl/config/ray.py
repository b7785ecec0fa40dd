"""Options of Ray inside a job: all that `submit ray` has, and a part of those of `submit ppo`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from hpc_rl.config.base import Path, Section
from hpc_rl.config.job import JobConfig


class RayConfig(Section):
    start_timeout_s: int = Field(300, ge=1)
    """Seconds in which all nodes must be in the cluster, and all workers must have started."""
    dashboard: bool = False
    """Start Ray's dashboard, on the first node's loopback; the log says how to reach it."""
    object_store_gb: float | None = Field(None, gt=0)
    """Shared memory for Ray's objects on each node, in 10^9 bytes; 30 % of the node's memory grant where null."""
    first_port: int | None = Field(None, ge=1024, le=65024)
    """First of the 512 ports that Ray uses on each node, for sites with a firewall; free ones by the job's id where
    null."""

    @property
    def object_store_bytes(self) -> int | None:
        return None if self.object_store_gb is None else int(self.object_store_gb * 10**9)


class RayKwargs(Section):
    ray_init: dict[str, Any] = {}
    """Arguments of ray.init; of these, num_cpus lowers the CPUs that Ray may use on each node."""
    timeline_json_file: Path | None = None
    """Write Ray's timeline of all tasks here at the end, for chrome://tracing or Perfetto."""

    @field_validator("ray_init")
    @classmethod
    def _whole_cpus(cls, value: dict[str, Any]) -> dict[str, Any]:
        cpus = value.get("num_cpus")
        if cpus is not None and (not isinstance(cpus, int) or cpus < 1):
            raise ValueError(f"num_cpus is {cpus!r}, and has to be a number of CPUs, at least 1")
        return value

    @property
    def num_cpus(self) -> int | None:
        """Most CPUs that Ray may use on a node."""
        found: int | None = self.ray_init.get("num_cpus")
        return found


class RayJobConfig(JobConfig):
    """`submit ray`: any program on a Ray cluster inside the job."""

    ray: RayConfig = RayConfig()
    ray_kwargs: RayKwargs = RayKwargs()
