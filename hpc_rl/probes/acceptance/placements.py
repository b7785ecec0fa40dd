"""The placements of rollout engines that a job can have, from the tables of engines and weight transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_rl.config.engines import ENGINES
from hpc_rl.probes.acceptance.bench import Layout

IN_PROCESS = "in the trainer's process"


@dataclass(frozen=True)
class Placing:
    """Where an engine runs, and how its weights arrive."""

    SAME: ClassVar[str] = "same devices"
    OTHER: ClassVar[str] = "other devices"

    engine: str
    shared: bool
    """Whether it uses the devices of the trainer."""
    transfer: str

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.SAME if self.shared else self.OTHER}, {self.transfer}"

    @classmethod
    def of_name(cls, name: str, device: str) -> Placing:
        """Return the placement with this name."""
        return next(placing for placing in placings(device) if placing.name == name)

    def settings(self, layout: Layout) -> dict[str, Any]:
        """Return the configuration keys of the placement, which the layout must allow."""
        settings: dict[str, Any] = {"rollout.name": self.engine}
        if not self.shared:
            settings |= {"pools.spec": splits(layout), "pools.roles": {"rollout": "engines"}}
        if layout.uses_gpus:
            settings |= {"rollout.engine_kwargs": {"enforce_eager": True} if self.engine == "vllm" else {}}
        return settings


def placings(device: str) -> list[Placing]:
    """Return the placements on a device, one for each way in which an engine can receive its weights."""
    found: dict[tuple[str, str], Placing] = {}
    for name, spec in ENGINES.items():
        for shared in (True, False) if device in spec.dtypes and spec.transfers else ():
            transfer = IN_PROCESS if shared and spec.in_process else _transfer(spec.transfers, device, shared)
            found.setdefault((name, transfer), Placing(name, shared, transfer))
    return list(found.values())


def splits(layout: Layout) -> dict[str, list[int]] | None:
    """Return pools with separate devices for trainer and engines, or None if there is only one device."""
    if layout.processes > 1:
        return {"trainer": [layout.processes - 1] * layout.nodes, "engines": [1] * layout.nodes}
    if layout.nodes > 1:
        return {"trainer": [1] * (layout.nodes - 1), "engines": [1]}
    return None


def _transfer(supported: tuple[str, ...], device: str, shared: bool) -> str:
    """Return the transfer that a run would choose. Without Ray, no run can; the name then has no transfer."""
    try:
        from hpc_rl.rl.weights.transfers import choose_transfer
    except ModuleNotFoundError:
        return "any transfer"
    return choose_transfer(supported, device, shared)
