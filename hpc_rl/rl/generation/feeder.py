"""Blocks on their way through the engines. There are always further blocks, so that no engine waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_rl.rl.generation.plan import Block, Plan, seeds_of
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.rollout.respondent import Respondent, Responses

DEPTH = 3
"""Blocks per engine: one whose last responses are generated, one that takes their places, and one for the time until
the driver reacts."""


@dataclass(frozen=True)
class _Flight:
    """A block that is being generated."""

    block: Block
    asked: list[Responses]

    @property
    def is_complete(self) -> bool:
        return all(one.is_complete for one in self.asked)


class Feeder:
    """Turns blocks into requests, and their responses into blocks.

    Args:
        engines: number of engines that generate.
    """

    def __init__(self, queue: Respondent, engines: int, plan: Plan, sampling: Sampling) -> None:
        self._queue = queue
        self._most = DEPTH * engines
        self._plan = plan
        self._sampling = sampling
        self._flights: list[_Flight] = []

    def __len__(self) -> int:
        """Return the number of blocks that are being generated."""
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether the engines need another block."""
        return len(self) < self._most

    def feed(self, block: Block) -> None:
        """Request the responses of a block. Earlier blocks go first."""
        block = replace(block, asked=list(block.asked))  # so that rows are read once
        n, seeds = self._plan.n, seeds_of(block, self._plan)
        asked = [
            self._queue.ask(
                one.prompt,
                [(seed, self._sampling) for seed in seeds[index * n : (index + 1) * n]],
                block.number,
            )
            for index, one in enumerate(block.asked)
        ]
        self._flights.append(_Flight(block, asked))

    def completed(self, timeout_s: float) -> list[tuple[Block, list[Completion]]]:
        """Let the engines generate until they have completed something, at most this long. Return the blocks that are
        complete.

        Raises:
            UserError: an engine refused a request.
            RunError: too many engines have died, or one takes too long to start.
        """
        self._queue.turn(timeout_s)
        done = [flight for flight in self._flights if flight.is_complete]
        self._flights = [flight for flight in self._flights if not flight.is_complete]
        return [(flight.block, [c for one in flight.asked for c in one.completions()]) for flight in done]
