"""All workers of a pool as one object. A method starts a call on every rank and returns a Pending result.

`hold` assigns a step's responses to the ranks: once, or again for each pass over them with other mini-batches. The
calls that follow compute on them, and the columns that they return are joined in the order of the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.rl.actors.calls import CALL_TIMEOUT_S, ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.actors.pools import Pool
from hpc_rl.rl.carriers.base import Carrier, ColumnHandle, DirectSink, shards_of
from hpc_rl.rl.carriers.through_ray import RayCarrier
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop.assignment import Assignment, assign_responses
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.rl.workers.learner import ROUTER, Sums
from hpc_rl.rl.workers.worker import Worker
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.causal_lm import Flops
from hpc_rl.training.perf import Span

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverConfig

T = TypeVar("T")


class WorkerGroup:
    """The workers of one pool.

    Args:
        roles: roles of the workers: actor, critic, ref, teacher, reward, and rollout for an engine in the workers'
            processes.
        share: part of its GPU (or CPU) that each worker takes; the rest is for an engine in a separate process.
        logs: folder of the workers' logs.
        carrier: brings responses and columns to the workers and back. Default: the calls contain them.
    """

    def __init__(
        self,
        config: DriverConfig,
        pool: Pool,
        roles: frozenset[str],
        share: float,
        logs: Path,
        carrier: Carrier | None = None,
    ) -> None:
        self._carrier = carrier or RayCarrier()
        self._trainer = config.trainer
        size = len(pool.slots)
        on_node = {slot.rank: len(node) for node in pool.nodes for slot in node}
        remote = ray.remote(Worker)
        self._workers = [
            remote.options(**slot.options(config.trainer.computes_on, share)).remote(
                config, pool.name, slot.rank, size, on_node[slot.rank], roles, logs
            )
            for slot in pool.slots
        ]
        self._names = [
            ActorLabel(
                f"rank {slot.rank} of pool {pool.name} on node {slot.node.name}",
                "worker",
                logs / f"node*-{pool.name}-rank{slot.rank}.log",
            )
            for slot in pool.slots
        ]
        self._nodes = [slot.node.id for slot in pool.slots]
        self.pool = pool.name
        self.row_tokens = 0
        """Largest number of tokens of a packed row; rl/loop/rows.py decides before responses are assigned."""
        self.longest_row = 0
        """Tokens of the longest row so far."""
        self._held: tuple[Assignment, torch.Tensor] | None = None
        """Assignment of the held responses, and their lengths in token columns [B]."""

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def start(self) -> Pending[None]:
        """Join the process group and load models."""
        group_dir = self._workers[0].new_group_dir.remote()
        return self._all("start", group_dir, combine=_nothing)

    def hold(
        self, experience: TensorDict, mini_batch_size: int | None, order: NDArray[np.int64] | None = None
    ) -> Pending[None]:
        """Assign a step's responses to the ranks, for all calls until the next `hold`.

        Args:
            mini_batch_size: responses of an update; None for all.
            order: order of the responses, [B], that is cut into mini-batches. Default: as they are.
        """
        assignment = self._assign(experience, mini_batch_size, order)
        self._held = (assignment, columns.lengths(experience))
        return self._each("hold", ([parcel] for parcel in self._carrier.shards(experience, assignment)), _nothing)

    def column(self, method: str) -> Pending[torch.Tensor]:
        """Return a token column of the held responses: that of the worker's method `logprobs`, for example."""
        return self._all(method, DirectSink(), combine=_joining(*self._assigned))

    def column_of(self, method: str, experience: TensorDict) -> Pending[torch.Tensor]:
        """Return a token column of these responses, which need not be held. They are one mini-batch."""
        assignment = self._assign(experience, None)
        arguments = ([DirectSink(), shard] for shard in shards_of(experience, assignment))
        return self._each(method, arguments, _joining(assignment, columns.lengths(experience)))

    def keep(self, method: str) -> Pending[Any]:
        """Compute a token column of the held responses that only `update` needs.

        Returns:
            the column, or what stands for it if it stays with the carrier.
        """
        kept = self._carrier.kept(*self._assigned)
        if kept is None:
            return self.column(method)
        sinks, column = kept
        return self._each(method, ([sink] for sink in sinks), lambda _: column)

    def reward_scores(self, experience: TensorDict) -> Pending[torch.Tensor]:
        """Return the reward model's scores of these responses, which need not be held: [B]."""
        assignment = self._assign(experience, None)

        def combine(parts: list[Any]) -> torch.Tensor:
            return torch.from_numpy(assignment.join_responses(parts))

        return self._each("reward_scores", ([shard] for shard in shards_of(experience, assignment)), combine)

    def update(
        self, role: str, token_columns: Mapping[str, torch.Tensor | ColumnHandle], step: int, total: int, epochs: int
    ) -> Pending[Sums]:
        """Update actor or critic on the held responses, in some passes over them.

        Args:
            token_columns: the columns that the role's loss needs, by name; see the role's `loss`.

        Returns:
            the sums over all ranks; for grad_norm, updates and lr, which are equal on all ranks, the value itself.
        """
        assignment, _ = self._assigned
        parcels = self._carrier.columns(assignment, token_columns)
        arguments = ([role, parcel, step, total, epochs] for parcel in parcels)
        return self._each("update", arguments, lambda parts: _add_sums(assignment.once(parts)))

    def engines(self) -> EngineActors:
        """Return the workers as engines, if there is one in each of their processes."""
        return EngineActors(self._workers, self._names, self._nodes, CALL_TIMEOUT_S)

    def sync_engine(self) -> Pending[None]:
        """Give the engines in the workers' processes the policy's weights."""
        return self._all("sync_engine", combine=_nothing)

    def connect_engines(self, engines: EngineActors, transfer: str) -> Pending[None]:
        """Prepare to send weights to engines in other processes, after they have started; see weights.transfers."""
        return self._all("connect_engines", engines, transfer, combine=_nothing)

    def send_weights(self) -> Pending[None]:
        """Send the policy's weights to these engines."""
        return self._all("send_weights", combine=_nothing)

    def publish_weights(self) -> Pending[list[Any]]:
        """Put the policy's weights into Ray's object store; see `hpc_rl.rl.weights.published`."""
        return self._all("publish_weights", combine=lambda parts: parts[0])

    def sleep_engine(self) -> Pending[None]:
        """Free the device memory of the engines in the workers' processes."""
        return self._all("sleep_engine", combine=_nothing)

    def save(self, role: str, path: Path) -> Pending[None]:
        """Begin to write model and optimizer of actor or critic."""
        return self._all("save", role, path, combine=_nothing)

    def saved(self, role: str) -> Pending[None]:
        """Wait until the latest `save` of a role is complete."""
        return self._all("saved", role, combine=_nothing)

    def export(self, path: Path, folder: Path) -> Pending[None]:
        """Write the weights of a checkpoint's first model into the folder of an exported model."""
        return self._all("export", path, folder, combine=_nothing)

    def load(self, role: str, path: Path) -> Pending[None]:
        """Read model and optimizer of actor or critic."""
        return self._all("load", role, path, combine=_nothing)

    def begin_trace(self) -> Pending[None]:
        """Record what the workers compute from now on."""
        return self._all("begin_trace", combine=_nothing)

    def end_trace(self, run: RunDir, step: int) -> Pending[None]:
        """Write what they have computed since `begin_trace` as the traces of a step."""
        return self._all("end_trace", run, step, combine=_nothing)

    def free_cache(self) -> Pending[None]:
        """Free GPU memory that the workers do not use, for an engine on the same GPUs."""
        return self._all("free_cache", combine=_nothing)

    def take_spans(self) -> Pending[dict[str, list[Span]]]:
        """Return when the first rank computed since the last call, by phase; see Spans.take.

        All ranks of a pool compute together.
        """
        call = ActorCall(self._workers[0].take_spans.remote(), self._names[0])
        return Pending.of_calls([call]).then(lambda parts: parts[0])

    def memory_bytes(self) -> Pending[int | None]:
        """Return the memory of the smallest GPU; None on CPUs."""
        return self._all("memory_bytes", combine=lambda parts: None if None in parts else min(parts))

    def max_memory_gb(self) -> Pending[float]:
        """Return the maximum memory held so far on any rank, in 10^9 bytes."""
        return self._all("max_memory_gb", combine=max)

    def flops(self) -> Pending[tuple[Flops, float | None]]:
        """Return the cost of training the policy, and the peak speed of one rank's device (None if unknown)."""
        return self._all("flops", combine=lambda parts: parts[0])

    @property
    def _assigned(self) -> tuple[Assignment, torch.Tensor]:
        if self._held is None:
            raise RuntimeError("the workers hold no responses: call `hold` first")
        return self._held

    def _assign(
        self, experience: TensorDict, mini_batch_size: int | None, order: NDArray[np.int64] | None = None
    ) -> Assignment:
        lengths, sampled = columns.all_lengths(experience).numpy(), columns.lengths(experience).numpy()
        how = (order, self._trainer.sequence_parallel, self._trainer.packing)
        assignment = assign_responses(lengths, sampled, mini_batch_size, self.size, self.row_tokens, *how)
        self.longest_row = max(self.longest_row, assignment.longest_row(lengths))
        return assignment

    def _all(self, method: str, *arguments: Any, combine: Callable[[list[Any]], T]) -> Pending[T]:
        return self._each(method, (arguments for _ in self._workers), combine)

    def _each(self, method: str, arguments: Iterator[Sequence[Any]], combine: Callable[[list[Any]], T]) -> Pending[T]:
        calls = [
            ActorCall(getattr(worker, method).remote(*own), who)
            for worker, own, who in zip(self._workers, arguments, self._names, strict=True)
        ]
        return Pending.of_calls(calls, self._carrier.watched).then(combine)


def _joining(assignment: Assignment, lengths_B: torch.Tensor) -> Callable[[list[Any]], torch.Tensor]:
    """Return a function that makes a token column from those of the ranks."""
    return lambda parts: columns.jagged(torch.from_numpy(assignment.join(parts)), lengths_B)


def _add_sums(parts: Sequence[Sums]) -> Sums:
    alike = ("updates", "grad_norm", "lr")
    return {
        name: value if name in alike or name.startswith(ROUTER) else sum(part[name] for part in parts)
        for name, value in parts[0].items()
    }


def add_passes(passes: Sequence[Sums]) -> Sums:
    """Return the sums of several passes over the same responses; they have the same learning rate."""
    return {name: value if name == "lr" else sum(one[name] for one in passes) for name, value in passes[0].items()}


def _nothing(_parts: list[Any]) -> None:
    return None
