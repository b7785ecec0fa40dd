"""The plan of a job: whether it fits, what it takes of GPUs, nodes and disks, and on how many nodes it fits.

The main path: shapes of the models -> phases -> the fullest one -> a verdict. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.pools import pool_of
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.plan.engines import Shapes, cache_tokens, engine_bytes, pool_of_engines
from hpc_rl.plan.gpu_memory import COMPUTE, ShardedModel
from hpc_rl.plan.hardware import TIGHT, USABLE
from hpc_rl.plan.memory import (
    ENGINE,
    Phase,
    PlacedModel,
    Planned,
    phases,
    placed_models,
)
from hpc_rl.plan.rows import MICRO_TOKENS, RowChoice, chosen

Verdict = Literal["fits", "is tight", "does not fit"]
TOKEN_BYTES = 4
"""Disk space of a token of tokenized data."""
PROCESS_BYTES = 5e9
"""Assumed: host memory of a process with torch and CUDA, without copies of weights."""


@dataclass(frozen=True)
class Engine:
    """What a rollout engine can hold beside its weights."""

    cache: float
    """Tokens whose keys and values fit; negative if the weights do not."""
    sequence: int
    """Largest number of tokens of a prompt with its response."""
    sequences: int
    """Most responses that it generates at the same time (rollout.max_num_seqs)."""

    @property
    def full_sequences(self) -> int:
        """Responses of the largest length that the cache holds at the same time."""
        return max(0, int(self.cache // self.sequence))


@dataclass(frozen=True)
class Plan:
    """What a job needs. Sizes are in bytes."""

    phases: tuple[Phase, ...]
    gpu: float
    """Memory of one GPU."""
    engine: Engine | None
    """None without an engine whose cache is known."""
    host: float
    """Host memory of one node."""
    offloaded: float
    """The part of it that keeps what is not on the GPUs (trainer.offload, model.enable_activation_offload)."""
    checkpoints: float
    """Disk space of all checkpoints that exist at the same time."""
    export: float
    """Disk space of the exported model."""
    window: float
    """Disk space of the tokens of a window of data that is read while the run trains, at their full length."""
    rows: RowChoice | None = None
    """The choice of trainer.micro_tokens=auto; None if the option is a number."""

    @property
    def fullest(self) -> Phase:
        """The phase with the most memory. An engine that is alone on its GPUs takes the part that it is told to take,
        so that its phase counts only if there is no other."""
        shared = [phase for phase in self.phases if phase.resident]
        return max(shared or self.phases, key=lambda phase: phase.peak)

    @property
    def usable(self) -> float:
        """The memory of a GPU that tensors can use."""
        return USABLE * self.gpu

    @property
    def headroom(self) -> float:
        """What remains of the usable memory in the fullest phase; negative if it does not fit."""
        return self.usable - self.fullest.peak

    @property
    def is_too_full(self) -> bool:
        """Whether the fullest phase needs more memory than a GPU has."""
        return bool(self.fullest.resident) and self.headroom < 0

    @property
    def training(self) -> float:
        """The most memory of the training processes, without engines in other processes."""
        return max(phase.training for phase in self.phases)

    @property
    def cache_is_short(self) -> bool:
        """Whether an engine cannot hold a single response of the largest length."""
        return self.engine is not None and self.engine.cache < self.engine.sequence

    @property
    def verdict(self) -> Verdict:
        """Whether the job fits."""
        if self.is_too_full or self.cache_is_short:
            return "does not fit"
        return "is tight" if self.fullest.resident and self.fullest.peak > TIGHT * self.usable else "fits"

    def fits(self, host: float = math.inf) -> bool:
        """Return whether the job fits, perhaps tightly.

        Args:
            host: memory of a node, in bytes, which has to hold what leaves the GPUs.
        """
        return self.verdict != "does not fit" and (not self.offloaded or self.offloaded < host)


def plan_of(config: Planned, shapes: Shapes, gpu: float) -> Plan:
    """Plan a job on GPUs. trainer.micro_tokens=auto is chosen for these GPUs.

    Args:
        shapes: of all models that `models_of` names.
        gpu: memory of one GPU, in bytes.
    """
    rows = chosen(config, shapes, gpu)
    if rows is not None:
        config = config.updated(MICRO_TOKENS, rows.tokens)
    models = placed_models(config, shapes, gpu)
    trained = [placed for placed in models if placed.held.trained]
    checkpoints = export = 0.0
    if isinstance(config.trainer, TrainingConfig):
        # One checkpoint more than are kept exists while the newest is written.
        checkpoints = (config.trainer.max_ckpt_to_keep + 1) * sum(_state_bytes(placed.held) for placed in trained)
        export = float(COMPUTE * shapes[config.model.path].total) if config.trainer.export else 0.0
    offloaded = sum(placed.held.on_host * placed.on_node for placed in models) + _inputs_bytes(trained)
    return Plan(
        phases=tuple(phases(config, shapes, gpu)),
        gpu=gpu,
        engine=_engine(config, shapes, gpu),
        host=_host_bytes(config, trained) + offloaded,
        offloaded=offloaded,
        checkpoints=checkpoints,
        export=export,
        window=_window_bytes(config),
        rows=rows,
    )


def plan_of_lent(config: PpoConfig | GenerateConfig, shapes: Shapes, gpu: float) -> Plan:
    """Plan a GPU of a job that lends its nodes to a run, which has an engine and nothing else of the run."""
    engine = {ENGINE: engine_bytes(config, shapes, gpu, shared=False)}
    # One in another process takes what there is.
    phase = Phase("generation", engine, {}) if engine_spec(config).in_process else Phase("generation", {}, engine)
    return Plan((phase,), gpu, _engine(config, shapes, gpu, is_lent=True), 0.0, 0.0, 0.0, 0.0, 0.0)


def fits(config: Planned, shapes: Shapes, gpu: float, host: float = math.inf) -> bool:
    """Return whether a job fits, perhaps tightly; see `Plan.fits`."""
    return plan_of(config, shapes, gpu).fits(host)


def _engine(config: Planned, shapes: Shapes, gpu: float, is_lent: bool = False) -> Engine | None:
    if not isinstance(config, PpoConfig | GenerateConfig) or (pool_of_engines(config) is None and not is_lent):
        return None
    cache = cache_tokens(config, shapes, gpu, is_lent)
    return None if cache is None else Engine(cache, config.data.longest, config.rollout.max_num_seqs)


def _window_bytes(config: Planned) -> float:
    if not isinstance(config, FinetuneConfig) or config.data.stream_rows is None:
        return 0.0
    return float(config.data.stream_rows * config.data.longest * TOKEN_BYTES)


def _inputs_bytes(trained: Sequence[PlacedModel]) -> float:
    """Return the host memory of a node for inputs of layers. Models of a pool take turns, and use the same blocks."""
    most: dict[tuple[str, int], int] = {}
    for placed in trained:
        size, count = placed.held.inputs(placed.tokens)
        key = placed.pool, size
        most[key] = max(most.get(key, 0), count * placed.on_node)
    return float(sum(size * count for (_, size), count in most.items()))


def _state_bytes(held: ShardedModel) -> float:
    """Return the bytes of a model in a checkpoint: what is trained, and its two moments."""
    return 3 * held.changed - 2 * held.saved


def _host_bytes(config: Planned, trained: Sequence[PlacedModel]) -> float:
    """Return the host memory of a node: its processes, and the copies from which checkpoints are written."""
    processes = config.trainer.n_gpus_per_node
    if isinstance(config, PpoConfig) and pool_of_engines(config) == pool_of(config, "actor"):
        processes *= 2  # an engine beside each training rank
    copies = 0.0
    if isinstance(config.trainer, TrainingConfig) and config.trainer.save_async:
        copies = sum(_state_bytes(placed.held) / placed.held.shards * placed.on_node for placed in trained)
    return processes * PROCESS_BYTES + copies
