"""Weights through host memory: shared memory to engines on the sender's node, Ray's object store to others.

A training rank writes each bucket to shared memory, and the engines on its node copy the tensors out of it. If a rank
holds the full parameters in the engine's type, they move into shared memory for good, so that the engine's copy is the
only one.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray
import torch

from hpc_rl.rl.actors.calls import ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorDiedError
from hpc_rl.rl.weights.base import EngineActors, WeightSource
from hpc_rl.rl.weights.buckets import Bucket, MemoryFile, TensorEntry, aligned, plan_buckets, used_bytes
from hpc_rl.training.parallel.distributed import World

IN_FLIGHT = 4
"""Buckets between sender and engines at a time. Together they have the size that the user set."""


class HostSender:
    """A WeightSender through host memory, on one training rank."""

    def __init__(self, source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> None:
        """Allocate the buckets of the engines that this rank serves. Every rank calls this."""
        self._source = source
        self._world = world
        self._timeout_s = engines.timeout_s
        own = ray.get_runtime_context().get_node_id()
        mine = assign_engines(engines.nodes, world.gather(own))[world.rank]
        self._near = engines.subset([index for index in mine if engines.nodes[index] == own])
        self._far = engines.subset([index for index in mine if engines.nodes[index] != own])
        self._buckets = plan_buckets(source.metadata(), bucket_bytes // IN_FLIGHT)
        self._moves_parameters = source.is_in_place()
        self._regions: list[tuple[MemoryFile, int]] = []
        """Memory of each bucket, and the position at which the bucket starts."""
        if mine:
            self._regions = self._allocate()

    def send_weights(self) -> None:
        """Send all weights, in buckets. Engines that have died are left out."""
        tensors = iter(self._source)
        if not self._regions:
            for entries in self._buckets:
                self._world.barrier()
                for _ in entries:  # takes part in gathering
                    next(tensors)
            return
        # An actor handles its calls in order, so only two waits are needed: for memory before reuse, and at the end.
        pending = [self._call_all("start_weight_update")]
        for entries, (memory, start) in zip(self._buckets, self._regions, strict=True):
            while len(pending) >= IN_FLIGHT:
                self._finish(pending.pop(0))
            # All ranks wait here on their CPUs. In the gathers they would wait on GPUs, which engines may share.
            self._world.barrier()
            for entry in entries:
                self._write(entry, next(tensors)[1], memory.bytes[start:])
            pending.append(self._hand_out(entries, memory, start))
        pending.append(self._call_all("finish_weight_update"))
        for calls in pending:
            self._finish(calls)

    def shutdown(self) -> None:
        """Do nothing: shared memory is freed with the last process that maps it."""

    def _finish(self, calls: Sequence[ActorCall]) -> None:
        """Wait for these calls. An engine that has died gets no others: its next request finds it dead."""
        for call in calls:
            try:
                Pending.of_calls([call]).wait(self._timeout_s)
            except ActorDiedError:
                self._near, self._far = self._near.without(call.actor), self._far.without(call.actor)

    def _allocate(self) -> list[tuple[MemoryFile, int]]:
        sizes = [aligned(used_bytes(entries)) for entries in self._buckets]
        if self._moves_parameters:
            memory = MemoryFile(sum(sizes))
            return [(memory, sum(sizes[:index])) for index in range(len(sizes))]
        files = [MemoryFile(max(sizes[first::IN_FLIGHT])) for first in range(min(IN_FLIGHT, len(sizes)))]
        return [(files[index % IN_FLIGHT], 0) for index in range(len(sizes))]

    def _write(self, entry: TensorEntry, tensor: torch.Tensor, region: torch.Tensor) -> None:
        target = entry.view(region)
        if target.data_ptr() == tensor.data_ptr():
            return
        target.copy_(tensor)
        if self._moves_parameters:
            self._source.parameters[entry.name].data = target

    def _hand_out(self, entries: tuple[TensorEntry, ...], memory: MemoryFile, start: int) -> list[ActorCall]:
        nbytes = used_bytes(entries)
        calls = self._near.calls("update_weights", Bucket(entries, memory.segment(start, nbytes)))
        if self._far.actors:
            copied = ray.put(Bucket(entries, memory.bytes[start : start + nbytes].numpy()))
            calls += self._far.calls("update_weights", copied)
        return calls

    def _call_all(self, method: str) -> list[ActorCall]:
        return self._near.calls(method) + self._far.calls(method)


def open_sender(source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> HostSender:
    """Return this rank's sender; `hpc_rl.rl.weights.transfers.Opener` describes the arguments."""
    return HostSender(source, engines, world, bucket_bytes)


def assign_engines(engine_nodes: Sequence[str], rank_nodes: Sequence[str]) -> list[list[int]]:
    """Return the engines that each rank serves: the first rank on an engine's node, or rank 0 if there is none."""
    served: list[list[int]] = [[] for _ in rank_nodes]
    for engine, node in enumerate(engine_nodes):
        served[rank_nodes.index(node) if node in rank_nodes else 0].append(engine)
    return served
