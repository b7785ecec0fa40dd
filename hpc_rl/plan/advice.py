"""Settings with which a job fits: the ones that cost the least time first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from hpc_rl.config.finetune import FinetuneConfig
from hpc_rl.config.generate import GenerateConfig
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.config.tree import put
from hpc_rl.plan.memory import Planned, Shapes
from hpc_rl.plan.plan import fits

MOST_NODES = 64
"""Largest number of nodes that is tried."""
Settings = dict[str, Any]
"""Dotted key -> value."""


@dataclass(frozen=True)
class Measure:
    """One way to need less memory."""

    reason: str
    """What it does and costs, for the user."""
    settings: Callable[[Any], Iterator[Settings]]
    """Yields the settings to try for a configuration, the one that changes least first; none if it does not apply."""


@dataclass(frozen=True)
class Advice:
    """Settings with which a job fits."""

    settings: Mapping[str, Any]
    reasons: tuple[str, ...]


def _sharding(config: Any) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig) and config.trainer.sharding != "full":
        yield {"trainer.sharding": "full"}


def _micro_tokens(config: Any) -> Iterator[Settings]:
    if isinstance(config, FinetuneConfig):
        longest = config.data.longest
    elif isinstance(config, PpoConfig):
        longest = config.data.max_prompt_length + config.data.max_response_length
    else:
        return
    size = config.trainer.micro_tokens
    while (size := size // 2) >= longest:
        yield {"trainer.micro_tokens": size}
    if size * 2 > longest:
        yield {"trainer.micro_tokens": longest}


def _recompute(config: Any) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig) and not config.model.enable_gradient_checkpointing:
        yield {"model.enable_gradient_checkpointing": True}


def _engine_share(config: Any) -> Iterator[Settings]:
    if isinstance(config, PpoConfig):
        given = config.rollout.gpu_memory_utilization or 0.5
        yield from ({"rollout.gpu_memory_utilization": share} for share in (0.4, 0.3, 0.6, 0.7) if share != given)


def _tensor_parallel(config: Any) -> Iterator[Settings]:
    if isinstance(config, PpoConfig | GenerateConfig):
        size, gpus = config.rollout.tensor_parallel_size, config.trainer.n_gpus_per_node
        while (size := size * 2) <= gpus:
            if gpus % size == 0:
                yield {"rollout.tensor_parallel_size": size}


def _adapters(config: Any) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig) and not config.model.lora.is_used:
        yield {"model.lora.rank": 32, "model.dtype": "bfloat16"}


MEASURES: tuple[Measure, ...] = (
    Measure("divide the model among all ranks", _sharding),
    Measure("give the engine another part of each GPU", _engine_share),
    Measure("use smaller micro-batches", _micro_tokens),
    Measure("split each engine's model over several GPUs", _tensor_parallel),
    Measure("recompute activations, which takes about a third more time", _recompute),
    Measure("train adapters instead of all weights", _adapters),
)
"""Cheapest in time first. To add one, add a row."""
USUAL = MEASURES[:-1]
"""Those that change nothing about the result."""


def advise(config: Planned, shapes: Shapes, gpu: float, change_training: bool = True) -> Advice | None:
    """Return the fewest and cheapest settings with which a job fits on its nodes; None if there are none.

    Args:
        change_training: whether adapters, which change what is trained, are proposed if nothing else helps.
    """
    found = _cheapest(config, shapes, gpu, USUAL)
    return found or (_cheapest(config, shapes, gpu, MEASURES) if change_training else None)


def _cheapest(config: Planned, shapes: Shapes, gpu: float, measures: Sequence[Measure]) -> Advice | None:
    """Return the first combination of measures that helps: one before two, and cheap ones before others."""
    for size in range(1, len(measures) + 1):
        for chosen in combinations(measures, size):
            if (found := _first(config, shapes, gpu, chosen, {})) is not None:
                return Advice(found, tuple(measure.reason for measure in chosen))
    return None


def _first(
    config: Planned, shapes: Shapes, gpu: float, measures: tuple[Measure, ...], before: Settings
) -> Settings | None:
    """Return the first settings of some measures with which a job fits; each of them has to be set."""
    if not measures:
        changed = with_settings(config, before)
        return before if changed is not None and fits(changed, shapes, gpu) else None
    for settings in measures[0].settings(config):
        if (found := _first(config, shapes, gpu, measures[1:], {**before, **settings})) is not None:
            return found
    return None


def with_settings(config: Planned, settings: Mapping[str, Any]) -> Planned | None:
    """Return a configuration with other values; None if they are not valid together."""
    tree = config.model_dump()
    for key, value in settings.items():
        put(tree, key, value)
    try:
        return type(config).model_validate(tree)
    except ValidationError:
        return None


def more_nodes(config: Planned, shapes: Shapes, gpu: float) -> Advice | None:
    """Return the fewest nodes, more than a job has, on which it fits: with its own settings if others would be enough
    on the nodes that it has, otherwise with the settings that it needs there. None if there are none."""
    own_settings = advise(config, shapes, gpu, change_training=False) is not None
    return fewest(config, shapes, gpu, config.trainer.nnodes + 1, may_change=not own_settings)


def fewest(config: Planned, shapes: Shapes, gpu: float, first: int, may_change: bool) -> Advice | None:
    """Return the fewest nodes on which a job fits.

    Args:
        first: the smallest number to try.
        may_change: whether to change other settings too, as far as they do not change the result.

    Returns:
        None if it does not fit on MOST_NODES, or if its pools state the nodes.
    """
    if isinstance(config, PpoConfig | GenerateConfig) and config.pools.spec:
        return None
    for nodes in range(first, MOST_NODES + 1):
        larger, reason = config.updated("trainer.nnodes", nodes), "divide the model among more GPUs"
        if fits(larger, shapes, gpu):
            return Advice({"trainer.nnodes": nodes}, (reason,))
        found = advise(larger, shapes, gpu, change_training=False) if may_change else None
        if found is not None:
            return Advice({"trainer.nnodes": nodes, **found.settings}, (reason, *found.reasons))
    return None


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as they are typed on a command line."""
    return [f"{key}={_typed(value)}" for key, value in settings.items()]


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
