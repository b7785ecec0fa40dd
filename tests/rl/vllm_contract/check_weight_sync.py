"""Our senders, vLLM's transfers, vLLM's workers and our methods in them, each in a process of its own.

Trainers are ranks over gloo, which share a model by FSDP2. Weights arrive, also after a deep sleep and after an engine
was replaced; gathers are in the same order on all ranks, on the default stream, and complete before a broadcast begins.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.weights.base import EngineActors, WeightSource
from hpc_rl.rl.weights.transfers import open_sender
from hpc_rl.training.parallel.distributed import World
from tests.rl.vllm_contract.between import TIMEOUT_S, EngineHandle, connected, serve
from tests.rl.vllm_contract.pretend import Model, make_engine, make_worker
from tests.simulated_gpu.ranks import Beside, Rank, run_ranks
from tests.simulated_gpu.record import Call, Collective

SMALL_BUFFER = 100
"""Bytes: several buckets, and a tensor that is larger than one."""
SYNCS = 3
Weights = dict[str, list[Any]]


@dataclass(frozen=True)
class Layout:
    """Trainer ranks with a GPU each, and engines of `parallel` GPUs: the same GPUs for ipc, others for nccl."""

    backend: str
    trainers: int
    engines: int
    parallel: int = 1
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="sync-")))

    def handles(self, chosen: Sequence[int]) -> EngineActors:
        """Return these engines."""
        first = [self.trainers + engine * self.parallel for engine in chosen]
        actors = [EngineHandle(self.folder, tuple(range(start, start + self.parallel))) for start in first]
        names = [ActorLabel(f"engine {engine}", "engine") for engine in chosen]
        return EngineActors(actors, names, ["node"] * len(actors), TIMEOUT_S, self.parallel)

    @property
    def beside(self) -> Beside:
        return Beside(engine_process, self.engines * self.parallel)

    def __str__(self) -> str:
        return f"{self.backend}, {self.trainers} trainers, {self.engines} engines of {self.parallel}"


def engine_process(number: int, layout: Layout) -> None:
    """Be one process of an engine."""
    part = (number - layout.trainers) % layout.parallel
    with connected(layout.folder, number), torch.no_grad():
        model = Model(part, layout.parallel)
        worker = make_worker(layout.backend, model, part, layout.parallel)
        worker._sleep_mode_backend = memory = Memory(model)
        engine = make_engine(worker, layout.backend)

        def weights() -> Weights:
            return {name: tensor.tolist() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

        own = {"weights": weights, "memory": lambda: (memory.discarded, memory.resumed)}
        serve(layout.folder, number, lambda name: own.get(name) or getattr(engine, name))


def policy_of(world: World) -> nn.Module:
    torch.manual_seed(0)
    policy = Model()
    return fully_shard(policy, mesh=init_device_mesh("cpu", (world.size,))) if world.size > 1 else policy


def change(policy: nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            parameter.mul_(1.5).add_(number)


def answers(engines: EngineActors, method: str, *arguments: Any) -> list[Any]:
    """Call a method in all processes of all engines."""
    return engines.call(method, *arguments).wait(TIMEOUT_S)


def compare(source: WeightSource, engines: EngineActors, world: World) -> None:
    """Check that each process of an engine has its part of the policy's weights. Every rank calls this."""
    expected = {name: tensor.clone() for name, tensor in source}
    for number, found in enumerate(answers(engines, "weights") if world.is_main else []):
        part = number % engines.workers_each
        assert found.pop("table") == [0, 1, 2, 3]
        assert found == {name: tensor.chunk(engines.workers_each)[part].tolist() for name, tensor in expected.items()}


def sync(world: World, layout: Layout) -> None:
    """Be a trainer that sends some versions of its weights."""
    engines = layout.handles(range(layout.engines))
    policy = policy_of(world)
    source = WeightSource(policy, torch.float32)
    with connected(layout.folder, world.rank):
        sender = open_sender(layout.backend, source, engines, world, SMALL_BUFFER)
        for _ in range(SYNCS):
            change(policy)
            sender.send_weights()
            compare(source, engines, world)
        sender.shutdown()
        if world.is_main:
            answers(engines, "stop")


@pytest.mark.parametrize(
    "layout",
    [
        *(
            Layout("ipc", 1, 1),
            Layout("ipc", 2, 2),
            Layout("ipc", 2, 1, 2),
            Layout("ipc", 3, 3),
            Layout("ipc", 4, 2, 2),
        ),
        *(Layout("nccl", 1, 1), Layout("nccl", 1, 1, 2), Layout("nccl", 2, 1), Layout("nccl", 2, 2, 2)),
        *(Layout("nccl", 3, 1), Layout("nccl", 4, 3)),
    ],
    ids=str,
)
def test_every_sync_brings_the_current_weights(layout: Layout) -> None:
    found = run_ranks(sync, layout.trainers, layout, beside=layout.beside)
    for rank in found[: layout.trainers]:
        check_gathers(rank)
    sent = [row for row in found[0].collectives if row.group.startswith("nccl")]
    assert {row.stream for row in sent}.isdisjoint({"default"})
    assert bool(sent) == (layout.backend == "nccl")
    if layout.trainers > 1:
        assert len(gathers(found[0])) >= (SYNCS * 2) * 4  # each parameter in each sync, and in each comparison


def gathers(rank: Rank) -> list[Collective]:
    """Return the rank's gathers of weights."""
    return [row for row in rank.collectives if row.dtype == "float32" and not row.group.startswith("nccl")]


def check_gathers(rank: Rank) -> None:
    """Check that gathers are on the default stream, and that the host waits for each before it sends anything."""
    assert {row.stream for row in gathers(rank)} <= {"default"}
    is_complete = True
    for row in rank.record:
        if isinstance(row, Call):
            is_complete |= row[:2] in (("synchronize", "default"), ("synchronize", "device"))
        elif row in gathers(rank):
            is_complete = False
        elif row.group.startswith("nccl"):
            assert is_complete, f"{row} begins, and the gather before it may not have ended"


def replace(world: World, layout: Layout) -> None:
    """Be a trainer, one of whose engines is replaced by another."""
    policy = policy_of(world)
    source = WeightSource(policy, torch.float32)
    with connected(layout.folder, world.rank):
        sender = open_sender(layout.backend, source, layout.handles([0, 1]), world, SMALL_BUFFER)
        sender.send_weights()
        if world.is_main:
            answers(layout.handles([0]), "stop")
        sender.shutdown()
        engines = layout.handles([2, 1])
        sender = open_sender(layout.backend, source, engines, world, SMALL_BUFFER)
        change(policy)
        sender.send_weights()
        compare(source, engines, world)
        if world.is_main:
            answers(engines, "stop")


def test_a_replaced_engine_leaves_no_communicator() -> None:
    layout = Layout("nccl", 2, 3)
    main, _, _, survivor, successor = run_ranks(replace, layout.trainers, layout, beside=layout.beside)

    def of_nccl(rank: Rank) -> list[tuple[str, str]]:
        rows = [(row.name, row.group if isinstance(row, Collective) else row.subject) for row in rank.record]
        return [row for row in dict.fromkeys(rows) if row[1].startswith("nccl")]

    old, new = (name for what, name in of_nccl(main) if what == "broadcast")
    for rank in (main, survivor):
        assert of_nccl(rank) == [("broadcast", old), ("destroy", old), ("broadcast", new)]
    assert of_nccl(successor) == [("broadcast", new)]


def wake(world: World, layout: Layout) -> None:
    """Be a trainer whose engine has discarded its weights, and which then sends too few."""
    engines = layout.handles([0])
    policy = policy_of(world)
    source = WeightSource(policy, torch.float32)
    with connected(layout.folder, world.rank):
        sender = open_sender(layout.backend, source, engines, world, SMALL_BUFFER)
        answers(engines, "sleep")
        assert answers(engines, "memory") == [(["weights"], [])]
        sender.send_weights()
        compare(source, engines, world)
        answers(engines, "wake")
        assert answers(engines, "memory") == [(["weights"], [["weights"], ["kv_cache"]])]
        policy.second = nn.Identity()
        sender = open_sender(layout.backend, WeightSource(policy, torch.float32), engines, world, SMALL_BUFFER)
        with pytest.raises(UserError, match=r"no weights for 2 of its parameters \(second.bias, second.weight\)"):
            sender.send_weights()
        answers(engines, "stop")


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_weights_that_a_deep_sleep_discarded_are_replaced(backend: str) -> None:
    """Level 2 discards every tensor of the model; the buffers come back with the weights' memory."""
    layout = Layout(backend, 1, 1)
    run_ranks(wake, 1, layout, beside=layout.beside)


def test_buckets_in_host_memory_bring_the_weights_too() -> None:
    """The way for CPUs: vLLM reloads the model layer by layer, from buckets that our methods in its worker read."""
    policy, model = Model(), Model()
    engine = make_engine(make_worker("ipc", model), "host")
    for _ in range(2):
        change(policy)
        with torch.no_grad():
            engine.load_weights(policy.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(policy.named_parameters())[name]), name
    with pytest.raises(RunError, match=r"no weights for 2 of its parameters \(first.bias, first.weight\)"):
        engine.load_weights((f"second.{name}", weight) for name, weight in policy.second.named_parameters())


class Memory:
    """Stands for the allocator below vLLM's sleep mode: what is suspended without a copy loses its content."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.device_allocator import sleep_mode_backend

        self._model = model
        self.discarded: list[str] = []
        self.resumed: list[Any] = []
        self._suspend = sleep_mode_backend.CuMemBackend.suspend
        self._module = sleep_mode_backend

    def suspend(self, level: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: self)
            self._suspend(self, level)  # type: ignore[arg-type]

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        """See CuMemAllocator."""
        if "weights" not in offload_tags:
            self.discarded.append("weights")
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                tensor.fill_(torch.nan)

    def resume(self, tags: Any) -> None:
        self.resumed.append(tags)
