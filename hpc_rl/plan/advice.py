"""Settings with which a job fits: exact ones first, and among them the ones that cost the least time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from pydantic import ValidationError

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import SHARED_GPU
from hpc_rl.config.tree import put
from hpc_rl.plan.engines import Shapes
from hpc_rl.plan.memory import Planned, models_of
from hpc_rl.plan.plan import fits, plan_of
from hpc_rl.plan.rows import MICRO_TOKENS, least

Goal = Callable[[Planned], bool]
"""Whether a changed job is what is wanted."""
_RECOMPUTE = "model.enable_gradient_checkpointing"
_MORE_GPUS = "divide the model among more GPUs"
_LEAST_SLICE = 8192
"""Fewest tokens of a rank for which rows are divided: shorter samples are no reason to exchange them in each layer."""
MOST_NODES = 64
"""Largest number of nodes that is tried."""
Settings = dict[str, Any]
"""Dotted key -> value."""


@dataclass(frozen=True)
class Measure:
    """One way to need less memory."""

    reason: str
    """What it does and costs, for the user."""
    settings: Callable[[Any, Shapes], Iterator[Settings]]
    """Yields the settings to try for a configuration, the one that changes least first; none if it does not apply."""


@dataclass(frozen=True)
class Advice:
    """Settings with which a job fits."""

    settings: Mapping[str, Any]
    reasons: tuple[str, ...]


def _sharding(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig) and config.trainer.sharding != "full":
        yield {"trainer.sharding": "full"}


def _micro_tokens(config: Any, shapes: Shapes) -> Iterator[Settings]:
    size = config.trainer.micro_tokens
    if isinstance(config, GenerateConfig) or size == "auto" or not config.trainer.packing:
        return
    fewest_tokens = least(config)
    while (size := size // 2) >= fewest_tokens:
        yield {MICRO_TOKENS: size}
    if size * 2 > fewest_tokens:
        yield {MICRO_TOKENS: fewest_tokens}


def _sequence_parallel(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if isinstance(config, GenerateConfig) or not config.trainer.packing:
        return
    ranks, longest = config.trainer.n_gpus_per_node, config.data.longest
    is_open = config.trainer.micro_tokens == "auto"
    for size in range(config.trainer.sequence_parallel + 1, min(ranks, longest // _LEAST_SLICE) + 1):
        if ranks % size == 0 and all(shapes[path].may_be_split(size) for path in models_of(config).values()):
            yield {"trainer.sequence_parallel": size} | ({} if is_open else {MICRO_TOKENS: -(-longest // size)})


def _recompute(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig):
        stronger = {False: ("half", True), "half": (True,)}.get(config.model.enable_gradient_checkpointing, ())
        yield from ({_RECOMPUTE: value} for value in stronger)


def _host_inputs(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig) and not config.model.enable_activation_offload:
        yield {_RECOMPUTE: True, "model.enable_activation_offload": True}


def _offload(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if isinstance(config, GenerateConfig):
        return
    levels = ["none", "optimizer", *(["all"] if isinstance(config, PpoConfig) else [])]
    yield from ({"trainer.offload": level} for level in levels[levels.index(config.trainer.offload) + 1 :])


def _engine_share(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if isinstance(config, PpoConfig):
        given = config.rollout.gpu_memory_utilization or SHARED_GPU
        yield from ({"rollout.gpu_memory_utilization": share} for share in (0.4, 0.3, 0.6, 0.7) if share != given)


def _tensor_parallel(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if isinstance(config, PpoConfig | GenerateConfig):
        size, gpus = config.rollout.tensor_parallel_size, config.trainer.n_gpus_per_node
        while (size := size * 2) <= gpus:
            if gpus % size == 0:
                yield {"rollout.tensor_parallel_size": size}


def _eight_bits(config: Any, shapes: Shapes) -> Iterator[Settings]:
    optimizers = {} if isinstance(config, GenerateConfig) else config.optimizers
    settings = {f"{section}.moments": "8bit" for section, optim in optimizers.items() if optim.moments != "8bit"}
    if settings:
        yield settings


def _adapters(config: Any, shapes: Shapes) -> Iterator[Settings]:
    if not isinstance(config, GenerateConfig) and not config.model.lora.is_used:
        yield {"model.lora.rank": 32, "model.dtype": "bfloat16"}


MEASURES: tuple[Measure, ...] = (
    Measure("divide the model among all ranks", _sharding),
    Measure("change the part of each GPU that the engine takes", _engine_share),
    Measure("use smaller micro-batches", _micro_tokens),
    Measure("split each engine's model over several GPUs", _tensor_parallel),
    Measure("recompute activations, which takes up to a third more time", _recompute),
    Measure("recompute activations from inputs in host memory, which are copied while layers compute", _host_inputs),
    Measure("keep unused states in host memory, which takes time for copies", _offload),
    Measure("divide each row of tokens among neighbouring GPUs of a node", _sequence_parallel),
    Measure("keep AdamW's moments in 8 bits, which changes the result slightly", _eight_bits),
    Measure("train adapters instead of all weights", _adapters),
)
"""Those that change the result come last, and among the others those that cost the least time come first. To add one,
add a row."""
EXACT = MEASURES[:-2]
"""Those that change nothing about the result."""
FULL = MEASURES[:-1]
"""Those with which all weights are trained."""
USUAL = EXACT[:-3]
"""Those that are tried first: copies to the host, and GPUs that share rows, are for what does not fit otherwise."""


def advise(
    config: Planned,
    shapes: Shapes,
    gpu: float,
    change_training: bool = True,
    limit: float = math.inf,
    host: float = math.inf,
) -> Advice | None:
    """Return the fewest and cheapest settings with which a job fits on its nodes; None if there are none.

    Args:
        change_training: whether what changes the result is proposed if nothing else helps: first moments in 8 bits, and
            then adapters.
        limit: bytes that the training processes of the job may take on a GPU.
        host: memory of a node, in bytes.
    """

    def is_enough(changed: Planned) -> bool:
        plan = plan_of(changed, shapes, gpu)
        return plan.fits(host) and plan.training <= limit

    found = None
    for measures in (USUAL, EXACT, FULL, MEASURES) if change_training else (USUAL, EXACT):
        if found is None and _may_help(config, shapes, is_enough, measures):
            found = _cheapest(config, shapes, is_enough, measures)
    return found


def _cheapest(config: Planned, shapes: Shapes, is_enough: Goal, measures: Sequence[Measure]) -> Advice | None:
    """Return the first combination of measures that helps: one before two, and cheap ones before others."""
    for size in range(1, len(measures) + 1):
        for chosen in combinations(measures, size):
            if (found := _first(config, shapes, is_enough, chosen, {})) is not None:
                return Advice(found, tuple(measure.reason for measure in chosen))
    return None


def _may_help(config: Planned, shapes: Shapes, is_enough: Goal, measures: Sequence[Measure]) -> bool:
    """Return whether all measures together may help, with as much in host memory as each of them allows: a quick answer
    for jobs that are much too large."""
    strongest: Settings = {}
    for measure in measures:
        for settings in measure.settings(config, shapes) if measure.settings is not _engine_share else ():
            strongest |= settings
    shares = [{}, *_engine_share(config, shapes)]
    changed = (
        with_settings(config, {**strongest, **share, **hosted})
        for share, hosted in product(shares, _in_host_memory(config, shapes, strongest))
    )
    return any(one is None or is_enough(one) for one in changed)


def _in_host_memory(config: Any, shapes: Shapes, strongest: Settings) -> list[Settings]:
    """Return what may be in host memory, most of it first, by the settings that decide this and are in `strongest`."""
    choices = []
    if "trainer.offload" in strongest:
        levels = [{"trainer.offload": config.trainer.offload}, *_offload(config, shapes)]
        choices.append(levels[::-1])
    if "model.enable_activation_offload" in strongest:
        choices.append([{"model.enable_activation_offload": value} for value in (True, False)])
    return [{key: value for one in chosen for key, value in one.items()} for chosen in product(*choices)]


def _first(
    config: Planned, shapes: Shapes, is_enough: Goal, measures: tuple[Measure, ...], before: Settings
) -> Settings | None:
    """Return the first settings of some measures that are enough; each of the measures has to be used."""
    if not measures:
        changed = with_settings(config, before)
        return before if changed is not None and is_enough(changed) else None
    for settings in measures[0].settings(config, shapes):
        if (found := _first(config, shapes, is_enough, measures[1:], {**before, **settings})) is not None:
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


def more_nodes(config: Planned, shapes: Shapes, gpu: float, host: float = math.inf) -> Advice | None:
    """Return the fewest nodes, more than a job has, on which it fits: with its own settings if others would be enough
    on the nodes that it has, otherwise with the settings that it needs there. None if there are none."""
    own_settings = advise(config, shapes, gpu, change_training=False, host=host) is not None
    return fewest(config, shapes, gpu, config.trainer.nnodes + 1, may_change=not own_settings, host=host)


def fewest(
    config: Planned, shapes: Shapes, gpu: float, first: int, may_change: bool, host: float = math.inf
) -> Advice | None:
    """Return the fewest nodes on which a job fits.

    Args:
        first: the smallest number to try.
        may_change: whether to change other settings too, as far as they do not change the result.
        host: memory of a node, in bytes.

    Returns:
        None if it does not fit on MOST_NODES, or if its pools state the nodes.
    """
    if isinstance(config, PpoConfig | GenerateConfig) and config.pools.spec:
        return None

    def on(nodes: int) -> Advice | None:
        larger = config.updated("trainer.nnodes", nodes)
        if fits(larger, shapes, gpu, host):
            return Advice({"trainer.nnodes": nodes}, (_MORE_GPUS,))
        found = advise(larger, shapes, gpu, change_training=False, host=host) if may_change else None
        return found and Advice({"trainer.nnodes": nodes, **found.settings}, (_MORE_GPUS, *found.reasons))

    low, high, best = first, MOST_NODES, on(MOST_NODES)
    while best is not None and low < high:  # more nodes never need more memory of a GPU
        middle = (low + high) // 2
        found = on(middle)
        low, high, best = (low, middle, found) if found is not None else (middle + 1, high, best)
    return best


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as they are typed on a command line."""
    return [f"{key}={_typed(value)}" for key, value in settings.items()]


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
