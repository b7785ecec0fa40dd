"""The placements of rollout engines that a job can have, from the tables of engines and weight transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.formats.layouts import Covered, Sending, covered_by
from hpc_rl.probes.acceptance.bench import Layout

IN_PROCESS = "in the trainer's process"


@dataclass(frozen=True)
class Placing:
    """Where the engines of a run are, and how their weights arrive."""

    SAME: ClassVar[str] = "same devices"
    OTHER: ClassVar[str] = "other devices"

    engine: str
    transfer: str
    trainers: tuple[int, ...]
    """Trainer ranks on each node."""
    engines: tuple[int, ...] | None = None
    """Devices of the engines on each node; None: the trainer's. Empty if the layout has none left for them."""
    parallel: int = 1
    """Devices of an engine."""

    @property
    def shared(self) -> bool:
        """Whether engines use the devices of the trainer."""
        return self.engines is None

    @property
    def name(self) -> str:
        """The placement in words. If trainer and engines have different devices, the name ends with their
        numbers: those of one node, or those of all nodes if trainer and engines have nodes of their own."""
        if not self.engines:
            return f"{self.engine}, {self.SAME if self.shared else self.OTHER}, {self.transfer}"
        on_own_nodes = len(self.trainers) != len(self.engines)
        trainers, engines = (sum(each) if on_own_nodes else each[0] for each in (self.trainers, self.engines))
        return f"{self.engine}, {self.OTHER}, {self.transfer}, {trainers} + {engines}"

    def settings(self, layout: Layout) -> dict[str, Any]:
        """Return the configuration keys of the placement, which the layout must allow."""
        settings: dict[str, Any] = {"rollout.name": self.engine, "rollout.tensor_parallel_size": self.parallel}
        if self.engines:
            spec = {"trainer": list(self.trainers), "engines": list(self.engines)}
            settings |= {"pools.spec": spec, "pools.roles": {"rollout": "engines"}}
        if layout.uses_gpus:
            settings |= {"rollout.engine_kwargs": {"enforce_eager": True} if self.engine == "vllm" else {}}
        return settings

    def covers(self) -> list[Covered]:
        """Return the layouts that a run with this placement covers."""
        devices = self.trainers if self.engines is None else self.engines
        if not devices:
            return []
        trainers, engines = sum(self.trainers), devices[0] // self.parallel
        sending = Sending(self.transfer, trainers, engines, self.parallel, len(devices), self.shared)
        return covered_by(sending)


def placings(layout: Layout) -> list[Placing]:
    """Return the placements in a layout, one for each way in which an engine can receive its weights, and for each
    division of the devices between trainer and engines by which vLLM's own transfers differ."""
    found: dict[tuple[str, str], list[Placing]] = {}
    device, every = layout.device, (layout.processes,) * layout.nodes
    for name, spec in ENGINES.items():
        if device not in spec.dtypes or not spec.transfers:
            continue
        shared = IN_PROCESS if spec.in_process else _transfer(spec.transfers, device, True)
        found[name, shared] = [Placing(name, shared, every)]
        apart = _transfer(spec.transfers, device, False)
        divided = splits(layout) if apart != "host" else splits(layout)[:1]
        found.setdefault((name, apart), [Placing(name, apart, *one) for one in divided])
    return [placing for each in found.values() for placing in each]


def splits(layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the divisions of the devices of each node: one engine beside all other ranks, then as many engines as
    ranks. With one device on each node, trainer and engines have nodes of their own. The engines of a single device
    have none."""
    nodes, processes = layout.nodes, layout.processes
    if processes > 1:
        counts = [1, processes // 2] if processes > 3 else [1]
        return [((processes - count,) * nodes, (count,) * nodes) for count in counts]
    return [((1,) * (nodes - 1), (1,))] if nodes > 1 else [((1,), ())]


def parallel_placing(layout: Layout, size: int, shared: bool) -> Placing | None:
    """Return the placement of vLLM's engines with tensor parallelism of this size; None if a node is too small.

    Args:
        shared: whether they use the devices of the trainer. Otherwise they get half of a node's if that is enough.
    """
    nodes, processes = layout.nodes, layout.processes
    transfer = _transfer(ENGINES["vllm"].transfers, layout.device, shared)
    if shared:
        return None if processes % size else Placing("vllm", transfer, (processes,) * nodes, None, size)
    own = max(size, processes // 2 // size * size)
    return None if own >= processes else Placing("vllm", transfer, (processes - own,) * nodes, (own,) * nodes, size)


def _transfer(supported: tuple[str, ...], device: str, shared: bool) -> str:
    """Return the transfer that a run would choose. Without Ray, no run can; the name then has no transfer."""
    try:
        from hpc_rl.rl.weights.transfers import choose_transfer
    except ModuleNotFoundError:
        return "any transfer"
    return choose_transfer(supported, device, shared)
