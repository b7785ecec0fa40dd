"""How long a step takes: the operations and the bytes of its parts, and the range of speeds that GPUs reach. Pure
functions.

The main path: shapes of the models -> work of each pool -> seconds. Everything is counted at the full length of all
samples, so that it is an upper bound of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.pools import pool_of, pool_spec
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.config.training.common import recomputed_layers
from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.training.preferences import NEEDS_NO_REFERENCE, DpoConfig, RmConfig
from hpc_rl.formats.gpu_models import GpuModel
from hpc_rl.plan.engines import Shapes, cache_of, cache_tokens, weights_of_engine
from hpc_rl.plan.memory import Planned, models_of
from hpc_rl.plan.shape import Shape

MFU = (0.12, 0.55)
"""The part of a GPU's peak that training reaches. Measured: 12 % for 0.6B parameters and short samples, 55 % for 4B and
compiled layers, on one H200 (benchmarks/sft_gpu.py). Published: 36 to 41 % for 8B on eight H100
(https://github.com/pytorch/torchtitan/tree/main/benchmarks)."""
BANDWIDTH = (0.2, 0.75)
"""The part of the memory's bandwidth that generation reaches. Published: 77 % for single requests to 8B on an A100
(https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on); the lower end is assumed."""
PROMPTS = 1000
"""Prompts whose time is planned for a job that only generates: its blocks are no steps of a fixed size."""

FORWARD, TRAINED, FROZEN, RECOMPUTED = 1.0, 3.0, 2.0, 1.0
"""Forward passes that each pass costs: a forward pass, forward and backward, the same without gradients of weights, and
the second forward pass of recomputation."""


@dataclass(frozen=True)
class Duration:
    """The time of a job."""

    step: tuple[float, float]
    """The shortest and the longest time of a step, or of PROMPTS prompts, in seconds."""
    steps: float | None
    """Number of steps, or of times PROMPTS prompts; None if the data is not here."""
    nodes: int
    basis: str
    """What the time is computed from, for the user."""

    @property
    def run(self) -> tuple[float, float] | None:
        """The shortest and the longest time of the run in seconds, without start, saves and validation."""
        return None if self.steps is None else (self.steps * self.step[0], self.steps * self.step[1])

    @property
    def node_hours(self) -> tuple[float, float] | None:
        """The time of the run on all its nodes, in hours."""
        return None if self.run is None else (self.run[0] * self.nodes / 3600, self.run[1] * self.nodes / 3600)


@dataclass(frozen=True)
class PlannedWork:
    """A part of a step, which GPUs of a pool do together."""

    pool: str
    gpus: int
    operations: float = 0.0
    """Floating-point operations of all GPUs."""
    reads: float = 0.0
    """Bytes that each GPU reads from its memory, one after the other, while it generates."""

    def seconds(self, gpu: GpuModel, mfu: float, bandwidth: float) -> float:
        """Return the time of this part at some parts of the peaks of a GPU."""
        computing = self.operations / (self.gpus * gpu.tflops * 1e12 * mfu)
        return max(computing, self.reads / (gpu.bandwidth * 1e12 * bandwidth))


def items_of(config: Planned) -> int:
    """Return the samples or responses of a step, or of PROMPTS prompts."""
    if isinstance(config, PpoConfig):
        return config.data.train_batch_size * config.rollout.n
    return PROMPTS * config.rollout.n if isinstance(config, GenerateConfig) else config.data.train_batch_size


def length_of(config: Planned) -> int:
    """Return the largest number of tokens of a sample, of a pair, or of a response with its prompt."""
    return config.data.longest


def steps_of(config: Planned, rows: int | None) -> float | None:
    """Return the number of steps, or of times PROMPTS prompts; None if it depends on data of unknown size.

    Args:
        rows: of the data; None if their number is unknown.
    """
    if isinstance(config, GenerateConfig):
        if rows is None:
            return config.data.max_prompts and config.data.max_prompts / PROMPTS
        return min(rows, config.data.max_prompts or rows) / PROMPTS
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if rows is None:
        return None
    batch = config.data.train_batch_size  # the last batch of an epoch is smaller in fine-tuning, and left out in RL
    each = rows // batch if isinstance(config, PpoConfig) else -(-rows // batch)
    return config.trainer.total_epochs * each


def gpus_of(config: Planned) -> int:
    """Return the number of GPUs of a job, in all its pools."""
    if isinstance(config, FinetuneConfig):
        return config.trainer.nnodes * config.trainer.n_gpus_per_node
    return sum(map(sum, pool_spec(config).values()))


def step_seconds(config: Planned, shapes: Shapes, gpu: GpuModel, memory: float) -> tuple[float, float] | None:
    """Return the shortest and the longest time that a step may take.

    Args:
        memory: of one GPU, in bytes.

    Returns:
        None if the speed of the engine is unknown, because it generates in the training processes.
    """
    if not isinstance(config, FinetuneConfig) and engine_spec(config).in_process:
        return None
    parts = list(work_of(config, shapes, memory))
    (slow, fast), (rare, often) = MFU, BANDWIDTH
    return _seconds(config, parts, gpu, fast, often), _seconds(config, parts, gpu, slow, rare)


def work_of(config: Planned, shapes: Shapes, memory: float) -> Iterator[PlannedWork]:
    """Yield the parts of a step."""
    yield from _finetuning(config, shapes) if isinstance(config, FinetuneConfig) else _pooled(config, shapes, memory)


def operations(shape: Shape, tokens: float, length: int, passes: float, attention: float, head: bool = True) -> float:
    """Return the operations of passes over so many tokens, in samples of one length.

    2 for each parameter and token, and 4 * layers * Q * length for each token in attention: a third of the figures for
    training in PaLM, appendix B (https://arxiv.org/abs/2204.02311).

    Args:
        passes, attention: forward passes that the matrix products with weights, and those of attention, cost.
        head: whether the LM head computes each token.
    """
    weights = shape.active - (0 if head else shape.embedding)
    return tokens * (2 * passes * weights + attention * mixing(shape, length))


def mixing(shape: Shape, length: int) -> float:
    """Return the operations of a token in a forward pass, beside matrix products with weights."""
    attended = sum(2 * (one.queries + one.result) * min(length, one.window or length) for one in shape.attentions)
    return float(attended + sum(layer.mixer.operations for layer in shape.layers if layer.mixer))


def _seconds(config: Planned, parts: list[PlannedWork], gpu: GpuModel, mfu: float, bandwidth: float) -> float:
    """Return the time of a step: pools work one after the other, or at the same time if responses may be older."""
    by_pool: dict[str, float] = {}
    for part in parts:
        by_pool[part.pool] = by_pool.get(part.pool, 0.0) + part.seconds(gpu, mfu, bandwidth)
    overlaps = isinstance(config, FinetuneConfig) or (isinstance(config, PpoConfig) and config.rollout.staleness > 0)
    return max(by_pool.values()) if overlaps else sum(by_pool.values())


def _finetuning(config: FinetuneConfig, shapes: Shapes) -> Iterator[PlannedWork]:
    length, nodes, ranks = length_of(config), config.trainer.nnodes, config.trainer.n_gpus_per_node
    tokens = float(items_of(config) * length)
    teachers = (config.teacher.ranks_per_node or 0) if isinstance(config, DistillConfig) else 0
    gpus = nodes * (ranks - teachers)
    has_head = not isinstance(config, RmConfig)
    yield PlannedWork("", gpus, _training(config, shapes[config.model.path], tokens, length, has_head))
    if isinstance(config, DpoConfig) and config.algorithm.loss not in NEEDS_NO_REFERENCE:
        # Stored log-probabilities are computed once, which is a forward pass of the first epoch.
        reference = shapes[config.ref.path or config.model.path]
        passes = FORWARD if not config.ref.precompute_logprobs else FORWARD / config.trainer.total_epochs
        yield PlannedWork("", gpus, operations(reference, tokens, length, passes, passes))
    if isinstance(config, DistillConfig):
        teacher = operations(shapes[config.teacher.path], tokens, length, FORWARD, FORWARD)
        yield PlannedWork("teacher" if teachers else "", nodes * teachers or gpus, teacher)


def _pooled(config: PpoConfig | GenerateConfig, shapes: Shapes, memory: float) -> Iterator[PlannedWork]:
    length = config.data.longest
    tokens = float(items_of(config) * length)
    named = models_of(config)
    paths = {"critic": "critic.path", "teacher": "teacher.path", "reward": "reward.model"}
    for role in config.roles:
        pool = pool_of(config, role)
        gpus = sum(pool_spec(config)[pool])
        if role == "rollout":
            yield from _generation(config, shapes, memory, gpus)
            continue
        shape, has_head = shapes[named.get(paths.get(role, ""), config.model.path)], role not in ("critic", "reward")
        # With adapters, the actor is the reference too.
        passes = 2 * FORWARD if role == "actor" and _is_own_reference(config) else FORWARD
        work = operations(shape, tokens, length, passes, passes, has_head)
        if isinstance(config, PpoConfig) and role in ("actor", "critic"):
            work += config.actor.ppo_epochs * _training(config, shape, tokens, length, has_head)
        yield PlannedWork(pool, gpus, work)


def _is_own_reference(config: PpoConfig | GenerateConfig) -> bool:
    return isinstance(config, PpoConfig) and config.model.lora.is_used and config.algorithm.kl.where != "none"


def _generation(config: PpoConfig | GenerateConfig, shapes: Shapes, memory: float, gpus: int) -> Iterator[PlannedWork]:
    """Yield what engines do: they compute the prompts, and then read weights and cache once for each token.

    All responses to a prompt share its computation. The cache of a response is half full on average.
    """
    pool, rollout, data, shape = pool_of(config, "rollout"), config.rollout, config.data, shapes[config.model.path]
    items, parallel = items_of(config), config.rollout.tensor_parallel_size
    prompts = items / rollout.n * data.max_prompt_length
    yield PlannedWork(pool, gpus, operations(shape, prompts, data.max_prompt_length, FORWARD, FORWARD, head=False))
    cached = data.max_prompt_length + data.max_response_length / 2
    share = max(1.0, items * parallel / gpus)
    limit = cache_tokens(config, shapes, memory)
    at_once = min(share, rollout.max_num_seqs, share if limit is None else max(1.0, limit / cached))
    own_cache = cache_of(shape, int(cached), gpus=parallel)
    step_bytes = weights_of_engine(config, shape) + at_once * own_cache
    new = float(items * data.max_response_length)
    yield PlannedWork(
        pool,
        gpus,
        operations(shape, new, int(cached), FORWARD, FORWARD),
        share / at_once * data.max_response_length * step_bytes,
    )


def _training(config: FinetuneConfig | PpoConfig, shape: Shape, tokens: float, length: int, has_head: bool) -> float:
    layers = len(shape.layers)
    again = RECOMPUTED * len(recomputed_layers(config.model.enable_gradient_checkpointing, layers)) / layers
    passes = FROZEN if config.model.lora.is_used else TRAINED
    return operations(shape, tokens, length, passes + again, TRAINED + again, has_head)
