"""The section `pools` of reinforcement learning, `generate` and `eval`: which role computes on which GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field

from hpc_rl.config.base import Section

DEFAULT_POOL = "global_pool"
Role = Literal["actor", "critic", "ref", "teacher", "reward", "rollout"]


class PoolsConfig(Section):
    spec: dict[str, Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]] = {}
    """Pools of GPUs: for each name, the number of GPUs on each of its nodes. For example {train: [8, 8], rollout: [8]}.
    Empty: one pool, global_pool, of all nodes."""
    roles: dict[Role, str] = {}
    """Pool of each role: actor, critic, ref, teacher, reward and rollout; generate and eval have only the last two.
    Roles that are not listed use the first pool."""
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"
    """Placement of each entry of a pool. STRICT_PACK: on one node, or the job fails. PACK: on one node if possible."""


class PooledTrainer(Protocol):
    """What pools depend on in the section `trainer`."""

    @property
    def nnodes(self) -> int: ...
    @property
    def n_gpus_per_node(self) -> int: ...
    @property
    def uses_gpus(self) -> bool: ...


class PooledJob(Protocol):
    """A configuration of a job with pools (PpoConfig, GenerateConfig), as far as pools depend on it."""

    @property
    def pools(self) -> PoolsConfig: ...
    @property
    def trainer(self) -> PooledTrainer: ...
    @property
    def roles(self) -> list[Role]:
        """The roles that the job needs."""
        ...


def pool_spec(config: PooledJob) -> dict[str, list[int]]:
    """Return the number of GPUs on each node of each pool."""
    trainer = config.trainer
    return config.pools.spec or {DEFAULT_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}


def pool_of(config: PooledJob, role: Role) -> str:
    """Return the pool of a role, which is the first pool if none is named."""
    return config.pools.roles.get(role) or next(iter(pool_spec(config)))


def slot_unit(config: PooledJob) -> str:
    """Return what a pool consists of, for messages."""
    return "GPUs" if config.trainer.uses_gpus else "CPU slots"


def can_be_even(sizes: Sequence[int], nodes: int, slots: int) -> bool:
    """Return whether each node of a pool can have the same number of the pool's ranks.

    Args:
        sizes: ranks of each entry of the pool. An entry is on one node; entries share nodes if there are fewer nodes.
        nodes: nodes of the job.
        slots: ranks for which a node has room.
    """
    if nodes == 1:
        return True
    each, shares = len(sizes), slots // max(sizes)
    return len(set(sizes)) == 1 and any(each % used == 0 and each // used <= shares for used in range(1, nodes + 1))


def pool_problems(config: PooledJob) -> Iterator[str]:
    """Yield a message for each pool that cannot work."""
    spec = pool_spec(config)
    if unknown := {role: pool for role, pool in config.pools.roles.items() if pool not in spec}:
        for role, pool in unknown.items():
            yield f"pools.roles.{role} is {pool}, which is not one of the pools: {', '.join(spec)}"
        return
    used = {pool_of(config, role) for role in config.roles}
    for name in spec:
        if name not in used:
            named = " and ".join(role for role, pool in config.pools.roles.items() if pool == name)
            remedy = f"this job has no {named}, so leave it out" if named else "name it in pools.roles, or leave it out"
            yield f"pool {name} has no role: {remedy}"
    yield from _size_problems(config, spec)


def _size_problems(config: PooledJob, spec: Mapping[str, list[int]]) -> Iterator[str]:
    trainer, unit = config.trainer, slot_unit(config)
    needed, there = sum(map(sum, spec.values())), trainer.nnodes * trainer.n_gpus_per_node
    if needed > there or max(map(max, spec.values())) > trainer.n_gpus_per_node:
        needs = "; ".join(f"pool {name} needs {' + '.join(map(str, sizes))} {unit}" for name, sizes in spec.items())
        yield (
            f"{needs}; the job has {trainer.nnodes} x {trainer.n_gpus_per_node} "
            "(trainer.nnodes x trainer.n_gpus_per_node), and each entry of a pool has to be on one node"
        )
