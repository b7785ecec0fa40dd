"""Blocks on their way through the engines. Each engine always has further blocks, so that it never waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hpc_rl.errors import RunError
from hpc_rl.host.heartbeat import heart
from hpc_rl.rl.calls import CALL_TIMEOUT_S, ActorCall, Pending
from hpc_rl.rl.generation.plan import Block, Plan, seeds_of
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.weights.base import EngineActors

DEPTH = 3
"""Blocks that an engine has at a time: one whose last responses are generated, one that takes their places, and one
for the time until the driver reacts."""


@dataclass(frozen=True)
class Flight:
    """A block that an engine has."""

    block: Block
    engine: int
    calls: Sequence[ActorCall]
    """`add_block` and `next_block`."""


class Feeder:
    """Distributes blocks to the engine that has the fewest."""

    def __init__(self, engines: EngineActors, plan: Plan, sampling: Sampling) -> None:
        self._engines = engines
        self._plan = plan
        self._sampling = sampling
        self._flights: dict[Any, Flight] = {}
        """By Ray's reference to the result of `next_block`."""
        self._heard = time.monotonic()

    def __len__(self) -> int:
        """Return the number of blocks that the engines have."""
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether an engine takes another block."""
        return len(self) < DEPTH * len(self._engines.actors)

    def feed(self, block: Block) -> None:
        """Give a block to an engine."""
        loads = [0] * len(self._engines.actors)
        for flight in self._flights.values():
            loads[flight.engine] += 1
        engine = loads.index(min(loads))
        actor, name = self._engines.actors[engine], self._engines.names[engine]
        prompts = [asked.prompt.token_ids for asked in block.asked for _ in range(self._plan.n)]
        # An actor runs its calls in their order.
        added = actor.add_block.remote(prompts, seeds_of(block, self._plan), self._sampling)
        generated = actor.next_block.remote()
        self._flights[generated] = Flight(block, engine, [ActorCall(added, name), ActorCall(generated, name)])

    def completed(self, timeout_s: float) -> list[tuple[Block, list[Completion]]]:
        """Wait until a block is complete, at most this long, and return those that are.

        Raises:
            UserError: an engine refused a request.
            RunError: an engine died, or nothing was complete for a very long time.
        """
        with heart.waiting():
            ready, _ = ray.wait(list(self._flights), num_returns=1, timeout=timeout_s)
        if not ready and time.monotonic() - self._heard > CALL_TIMEOUT_S:
            raise RunError(f"no block of responses was complete within {CALL_TIMEOUT_S:.0f} s")
        found = []
        for ref in ready:
            self._heard = time.monotonic()
            flight = self._flights.pop(ref)
            _, completions = Pending.of_calls(flight.calls).wait()
            found.append((flight.block, completions))
        return found
