"""What trainer.micro_tokens=auto is: the largest rows that fit, and that make a job faster. Pure functions.

The main path: what one sample needs -> larger rows, as far as every phase that computes them fits -> a number, and the
reason for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.plan.engines import Shapes
from hpc_rl.plan.hardware import TIGHT, USABLE
from hpc_rl.plan.memory import Phase, Planned, phases, placed_models

MICRO_TOKENS = "trainer.micro_tokens"
"""The option."""
UNIT = 1024
"""The tokens of a row are this number times a power of two."""
USUAL = 4 * UNIT
"""On CPUs, and where memory is not planned."""
MOST = 32 * UNIT
"""Longer rows are hardly faster. Measured: the host needs 0.2 s to launch the kernels of a micro-batch, whatever its
length (Qwen3-0.6B, one H200, docs/benchmarks.md). 8,192 tokens reach 14 % of the GPU's peak in this time, so about
29,000 tokens reach half of the peak, and with a larger model fewer tokens do."""
ENOUGH = 0.95
"""Part of the usable memory that rows in use may take, as measured. Longer rows are chosen with more room (TIGHT),
because a plan may be wrong."""

Reason = Literal["memory", "part", "speed", "host"]
"""Why rows are not longer: they would not fit, nothing would fill them, they would be no faster, or their inputs would
fill the host's memory."""


@dataclass(frozen=True)
class RowChoice:
    """The choice of trainer.micro_tokens=auto."""

    tokens: int
    """Of one rank."""
    fullest: Phase
    """The phase that computes such rows and needs the most memory."""
    reason: Reason
    limit: float
    """The bytes of a GPU that such rows, or longer ones, may fill."""
    longer: tuple[int, float] | None = None
    """The next number of tokens, and the bytes that such rows would need; None if memory is not the reason."""


def is_auto(config: Planned) -> bool:
    """Return whether trainer.micro_tokens is auto, and the job computes rows."""
    return config.trainer.micro_tokens == "auto" and (
        not isinstance(config, GenerateConfig) or "reward" in config.roles
    )


def least(config: Planned) -> int:
    """Return the fewest tokens of a rank with which a row holds the longest sample."""
    return -(-config.data.longest // config.trainer.sequence_parallel)


def usual(config: Planned) -> int:
    """Return what auto is on CPUs, and where memory is not planned."""
    return max(USUAL, _at_least(least(config)))


def chosen(config: Planned, shapes: Shapes, gpu: float, unplanned: float = 0.0) -> RowChoice | None:
    """Choose trainer.micro_tokens=auto: the most tokens with which each phase that computes rows fits, or needs no more
    than with the shortest rows, which hold the longest sample.

    Args:
        shapes: of all models that `models_of` names.
        gpu: memory of one GPU, in bytes.
        unplanned: bytes that training processes were measured to need beside what is planned; negative if they need
            less.

    Returns:
        None if the option is a number.
    """
    if not is_auto(config):
        return None
    first = least(config)
    shortest = _computing(config, shapes, gpu, first)
    most, reason = _most(config, shapes, gpu)
    tokens, found = first, shortest
    for longer in _sizes(first, most):
        needed, limit = _computing(config, shapes, gpu, longer), _limit(longer, gpu)
        pairs = zip(needed, shortest, strict=True)
        too_full = [one for one, before in pairs if one.peak > max(limit - unplanned, before.peak)]
        if too_full:
            most_bytes = max(one.peak for one in too_full) + unplanned
            return RowChoice(tokens, _fullest(found), "memory", limit, (longer, most_bytes))
        tokens, found = longer, needed
    return RowChoice(tokens, _fullest(found), reason, _limit(tokens, gpu))


def corrected(
    config: Planned, shapes: Shapes, gpu: float, tokens: int, longest: int, measured: Mapping[str, float]
) -> int:
    """Choose again, after steps in which the memory was measured. Return the tokens of the next rows.

    Rows get longer only if those of the measurement were nearly full. They get shorter only if little memory is left.

    Args:
        tokens: of the rows in use.
        longest: most tokens of a rank's micro-batch in these steps.
        measured: the most bytes of a training process on a GPU, by pool as in `Phase.pool`.
    """
    unplanned = _unplanned(phases(config.updated(MICRO_TOKENS, longest), shapes, gpu), measured)
    needed = max(phase.peak for phase in _computing(config, shapes, gpu, tokens)) + unplanned
    rows = chosen(config, shapes, gpu, unplanned)
    assert rows is not None
    if rows.tokens > tokens:
        return rows.tokens if longest >= tokens // 2 else tokens
    return rows.tokens if needed > ENOUGH * USABLE * gpu else tokens


def _unplanned(planned: list[Phase], measured: Mapping[str, float]) -> float:
    """Return how many bytes more were measured than planned, for the pool with the largest difference.

    A phase that computes no rows may need the most memory, and then hides what the others need: a measurement between
    what is planned for the two shows nothing.
    """

    def of_pool(pool: str) -> float:
        own = [phase for phase in planned if phase.pool == pool]
        every = max(phase.training for phase in own)
        computing = max(phase.training for phase in own if phase.computes)
        return max(measured[pool] - every, min(0.0, measured[pool] - computing))

    return max(map(of_pool, measured))


def _limit(tokens: int, gpu: float) -> float:
    """Return the bytes that rows may fill. Rows of up to USUAL tokens may fill a GPU, because shorter rows are slow;
    longer rows leave room for what is not planned."""
    return (1.0 if tokens <= USUAL else TIGHT) * USABLE * gpu


def _computing(config: Planned, shapes: Shapes, gpu: float, tokens: int) -> list[Phase]:
    """Return the phases that compute rows, with rows of so many tokens."""
    return [phase for phase in phases(config.updated(MICRO_TOKENS, tokens), shapes, gpu) if phase.computes]


def _fullest(computing: list[Phase]) -> Phase:
    return max(computing, key=lambda phase: phase.peak)


def _most(config: Planned, shapes: Shapes, gpu: float) -> tuple[int, Reason]:
    """Return the most tokens that are of any use, and the reason for this limit."""
    if not isinstance(config, GenerateConfig) and config.model.enable_activation_offload:
        return USUAL, "host"
    models = placed_models(config.updated(MICRO_TOKENS, MOST), shapes, gpu)
    part = max((placed.tokens for placed in models), default=0)  # 0: there is no batch
    return (part, "part") if 0 < part < MOST else (MOST, "speed")


def _sizes(first: int, most: int) -> Iterator[int]:
    """Yield the numbers of tokens to choose from: those that hold the longest sample, up to one that holds `most`."""
    size, last = _at_least(first), _at_least(most)
    yield size
    while size < last:
        size *= 2
        yield size


def _at_least(tokens: int) -> int:
    """Return the smallest power of two times 1,024 that is not below a number."""
    return UNIT << max(0, (-(-tokens // UNIT) - 1).bit_length())
