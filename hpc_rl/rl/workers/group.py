"""All workers of a pool as one object: a method runs on every rank, and returns at once what can be waited for.

A step's responses are dealt to the ranks once (`hold`), by tokens; the calls after it compute on them, and columns that
come back are put together in the order of the responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.config.ppo import PpoConfig
from hpc_rl.rl import experience as columns
from hpc_rl.rl.calls import ActorCall, Pending
from hpc_rl.rl.dealing import Layout, Shard, plan_step, shards
from hpc_rl.rl.pools import Pool
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.rl.workers.learner import Sums
from hpc_rl.rl.workers.worker import Worker
from hpc_rl.training.model import Flops

T = TypeVar("T")


class WorkerGroup:
    """The workers of one pool.

    Args:
        roles: whose models the workers hold: actor, critic, ref, reward, and rollout for an engine in their processes.
        share: part of its GPU (or CPU) that each worker takes; the rest is for an engine of its own process.
        logs: folder of the workers' logs.
    """

    def __init__(self, config: PpoConfig, pool: Pool, roles: frozenset[str], share: float, logs: Path) -> None:
        self._micro_tokens = config.trainer.micro_tokens
        self._mini_batch_size = config.actor.mini_batch_size
        size = len(pool.slots)
        remote = ray.remote(Worker)
        self._workers = [
            remote.options(**slot.options(config.trainer.device, share)).remote(
                config, pool.name, slot.rank, size, roles, logs
            )
            for slot in pool.slots
        ]
        self._names = [f"rank {s.rank} of pool {pool.name} on node {s.node.name} (log in {logs})" for s in pool.slots]
        self._layout: Layout | None = None
        self._lengths_B: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return len(self._workers)

    def start(self) -> Pending[None]:
        """Join the process group and load models."""
        endpoint = self._workers[0].endpoint.remote()
        return self._all("start", endpoint, combine=_nothing)

    def hold(self, experience: TensorDict) -> Pending[None]:
        """Deal a step's responses to the ranks, for all calls until the next `hold`."""
        self._layout = self._plan(experience, self._mini_batch_size)
        self._lengths_B = columns.lengths(experience)
        return self._each("hold", ([shard] for shard in self._shards(experience, self._layout)), _nothing)

    def logprobs(self) -> Pending[torch.Tensor]:
        """The policy's log-probabilities: a token column."""
        return self._all("logprobs", combine=self._column)

    def ref_logprobs(self) -> Pending[torch.Tensor]:
        """The reference's: a token column."""
        return self._all("ref_logprobs", combine=self._column)

    def values(self) -> Pending[torch.Tensor]:
        """The critic's: a token column."""
        return self._all("values", combine=self._column)

    def reward_scores(self, experience: TensorDict) -> Pending[torch.Tensor]:
        """The reward model's scores of any responses, held or not: [B]."""
        layout = self._plan(experience, None)

        def combine(parts: list[Any]) -> torch.Tensor:
            return torch.from_numpy(layout.join_rows(parts))

        return self._each("reward_scores", ([shard] for shard in self._shards(experience, layout)), combine)

    def update(self, role: str, token_columns: Mapping[str, torch.Tensor], step: int, total: int) -> Pending[Sums]:
        """One step's updates of actor or critic.

        Args:
            token_columns: what the role's loss needs, by name; see the role's `loss`.

        Returns:
            the sums over all ranks; grad_norm, updates and lr, which all ranks have alike, as they are.
        """
        assert self._layout is not None
        parts = {name: self._layout.split(column.values().numpy()) for name, column in token_columns.items()}
        arguments = (
            [role, {name: part[rank] for name, part in parts.items()}, step, total] for rank in range(self.size)
        )
        return self._each("update", arguments, _add_sums)

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        """By the engines in the workers' processes; each takes a contiguous part."""
        return self._each("generate", split_requests(prompts, seeds, sampling, self.size), concatenate)

    def sync_engine(self) -> Pending[None]:
        return self._all("sync_engine", combine=_nothing)

    def connect_engines(self, engines: EngineActors, transfer: str) -> Pending[None]:
        """Prepare to send weights to engines in other processes, which have started; see weights.transfers."""
        endpoint = self._workers[0].endpoint.remote()
        return self._all("connect_engines", engines, transfer, endpoint, combine=_nothing)

    def send_weights(self) -> Pending[None]:
        """Send the policy's weights to these engines."""
        return self._all("send_weights", combine=_nothing)

    def sleep_engine(self) -> Pending[None]:
        return self._all("sleep_engine", combine=_nothing)

    def save(self, role: str, path: Path) -> Pending[None]:
        return self._all("save", role, path, combine=_nothing)

    def load(self, role: str, path: Path) -> Pending[None]:
        return self._all("load", role, path, combine=_nothing)

    def free_cache(self) -> Pending[None]:
        """Make room on the GPUs for an engine."""
        return self._all("free_cache", combine=_nothing)

    def max_memory_gb(self) -> Pending[float]:
        """Of the rank that holds most."""
        return self._all("max_memory_gb", combine=max)

    def flops(self) -> Pending[tuple[Flops, float | None]]:
        """What training the policy costs, and what one rank's device can do in a second, if that is known."""
        return self._all("flops", combine=lambda parts: parts[0])

    def _plan(self, experience: TensorDict, mini_batch_size: int | None) -> Layout:
        prompts, responses = columns.lengths(experience, "prompt_ids"), columns.lengths(experience)
        return plan_step(prompts.numpy(), responses.numpy(), mini_batch_size, self.size, self._micro_tokens)

    def _shards(self, experience: TensorDict, layout: Layout) -> list[Shard]:
        prompts, responses = (
            [row.numpy() for row in experience[name].unbind()] for name in ("prompt_ids", "response_ids")
        )
        return shards(layout, prompts, responses)

    def _column(self, parts: list[Any]) -> torch.Tensor:
        assert self._layout is not None and self._lengths_B is not None
        return columns.jagged(torch.from_numpy(self._layout.join(parts)), self._lengths_B)

    def _all(self, method: str, *arguments: Any, combine: Callable[[list[Any]], T]) -> Pending[T]:
        return self._each(method, (arguments for _ in self._workers), combine)

    def _each(self, method: str, arguments: Iterator[Sequence[Any]], combine: Callable[[list[Any]], T]) -> Pending[T]:
        calls = [
            ActorCall(getattr(worker, method).remote(*own), who)
            for worker, own, who in zip(self._workers, arguments, self._names, strict=True)
        ]
        return Pending.of_calls(calls).then(combine)


def split_requests(
    prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling, engines: int
) -> Iterator[tuple[Sequence[NDArray[np.int32]], Sequence[int], Sampling]]:
    """Contiguous parts of about equal size, so that equal prompts, which stand together, mostly share an engine."""
    edges = np.linspace(0, len(prompts), engines + 1).round().astype(int)
    for start, end in itertools.pairwise(edges):
        yield prompts[start:end], seeds[start:end], sampling


def concatenate(parts: list[list[T]]) -> list[T]:
    return [item for part in parts for item in part]


def _add_sums(parts: list[Sums]) -> Sums:
    alike = ("updates", "grad_norm", "lr")
    return {name: value if name in alike else sum(part[name] for part in parts) for name, value in parts[0].items()}


def _nothing(_parts: list[Any]) -> None:
    return None
