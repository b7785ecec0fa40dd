"""KINDS: the one table of job kinds. A new kind is a row here, an options file and a module that trains.

The table is in `config` because the commands, the site profiles, the launcher and the trainers all read it. Its
references are strings, so that `hpc-rl --help` and the login node import none of them before they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_rl.config.job import JobConfig


@dataclass(frozen=True)
class JobKind:
    """One row: what `hpc-rl submit NAME` runs."""

    name: str
    """Also the name of its recipe, configs/NAME.yaml."""
    meaning: str
    """A few words for help pages."""
    options: str
    """Module and class of its options: a JobConfig."""
    node_entry: str
    """Module that runs on each node, in a Slurm task."""
    template: str
    """Template of the job script, in slurm_templates/."""
    trainer: str | None = None
    """Module of this project that the node entry starts; None if the job runs a program of the user's."""
    needs: tuple[str, ...] = ()
    """Packages that the job's Python has to have."""
    is_internal: bool = False
    """Whether hpc-rl submits it for itself, so that `submit` does not offer it."""

    @property
    def schema(self) -> type[JobConfig]:
        """The class of its options."""
        module, _, name = self.options.partition(":")
        found: type[JobConfig] = getattr(import_module(module), name)
        return found

    @property
    def takes_program(self) -> bool:
        """Whether the user gives the program that runs, after `--`."""
        return self.trainer is None and not self.is_internal


_TRAINING = ("torch", "transformers", "safetensors")

KINDS: dict[str, JobKind] = {
    kind.name: kind
    for kind in (
        JobKind(
            name="sft",
            meaning="supervised fine-tuning",
            options="hpc_rl.config.sft:SftConfig",
            trainer="hpc_rl.finetune.train",
            needs=_TRAINING,
            node_entry="hpc_rl.node.torchrun",
            template="torchrun.sbatch.j2",
        ),
        JobKind(
            name="ppo",
            meaning="reinforcement learning (PPO, GRPO, ...)",
            options="hpc_rl.config.ppo:PpoConfig",
            trainer="hpc_rl.rl.main_ppo",
            needs=(*_TRAINING, "ray", "tensordict"),
            node_entry="hpc_rl.node.ray_cluster.node",
            template="ray.sbatch.j2",
        ),
        JobKind(
            name="torchrun",
            meaning="your own torchrun program",
            options="hpc_rl.config.job:JobConfig",
            needs=("torch",),
            node_entry="hpc_rl.node.torchrun",
            template="torchrun.sbatch.j2",
        ),
        JobKind(
            name="ray",
            meaning="your own Ray program",
            options="hpc_rl.config.ray:RayJobConfig",
            needs=("ray",),
            node_entry="hpc_rl.node.ray_cluster.node",
            template="ray.sbatch.j2",
        ),
        JobKind(
            name="doctor",
            meaning="checks of the nodes",
            options="hpc_rl.config.ray:RayJobConfig",
            node_entry="hpc_rl.node.doctor",
            template="doctor.sbatch.j2",
            is_internal=True,
        ),
    )
}


def offered() -> Iterator[JobKind]:
    """Kinds that a user can submit, in the table's order."""
    return (kind for kind in KINDS.values() if not kind.is_internal)


def trained() -> list[str]:
    """Names of the kinds that train a model: those that can be stages of a chain."""
    return [kind.name for kind in KINDS.values() if kind.trainer is not None]
