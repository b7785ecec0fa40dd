"""Options of `hpc-rl lend`, which lends nodes to a run."""

from __future__ import annotations

from pydantic import Field

from hpc_rl.config.base import Section
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.formats.offer import LENT


class WaitSection(Section):
    wait_s: int = Field(600, ge=0)
    """Seconds that a lent node waits for a run that takes no nodes now, because it starts or is queued again. Then the
    node is released."""


class LendSection(WaitSection):
    auto_most: int = Field(16, ge=0)
    """Limit of the site: lender jobs of a run that `hpc-rl lend RUN --auto N` may keep in Slurm, waiting and running
    together. 0: none."""
    auto_at_a_time: int = Field(4, ge=1)
    """Limit of the site: lender jobs that a run may queue at a time, every `lend.auto_look_s` seconds."""
    auto_look_s: int = Field(60, ge=1)
    """Seconds between two checks in which a run queues or cancels lender jobs (`hpc-rl lend RUN --auto N`)."""
    engine_package: str | None = None
    """Package of the run's engine, whose version has to be the same on lent nodes. `hpc-rl lend` sets it."""
    resource: str = LENT
    """Ray's resource of the nodes, from which the run sees what they are for. `hpc-rl lend` sets it."""


class LendConfig(RayJobConfig):
    lend: LendSection = LendSection()
