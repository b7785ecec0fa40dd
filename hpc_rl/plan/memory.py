"""The phases of a job, and the memory of a GPU in each: from the configuration and the shapes of its models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.pools import Role, pool_of, pool_spec
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.config.training.common import LoraConfig, ModelConfig, OptimConfig, Sharding, TrainingConfig
from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.training.moments import saved_by_eight_bits
from hpc_rl.config.training.preferences import NEEDS_NO_REFERENCE, DpoConfig, RmConfig
from hpc_rl.config.training.sharding import STATE_BYTES, auto_sharding
from hpc_rl.plan.engines import ENGINE_BYTES, Shapes, engine_bytes, pool_of_engines, weights_of_engine
from hpc_rl.plan.gpu_memory import COMPUTE, FLOAT32, Head, Parts, ShardedModel
from hpc_rl.plan.shape import Shape

ENGINE, SLEEPING, ENGINE_WEIGHTS = ENGINE_PARTS = ("engine", "sleeping engine", "weights of the engine")
"""Parts of a phase that belong to an engine in another process: while it generates, sleeps, and receives weights."""
Planned = FinetuneConfig | PpoConfig | GenerateConfig


@dataclass(frozen=True)
class Phase:
    """What is in the memory of a GPU of a pool during a part of a step, in bytes."""

    name: str
    resident: Parts
    """Held from phase to phase, by role or part."""
    working: Parts
    """What exists beside it at the peak."""
    pool: str = ""
    """Empty if the job has no pools."""
    computes: bool = False
    """Whether the phase computes micro-batches, so that trainer.micro_tokens determines its memory."""

    @property
    def peak(self) -> float:
        """The most memory of the phase."""
        return sum(self.resident.values()) + sum(self.working.values())

    @property
    def training(self) -> float:
        """The part of the peak that training processes take, without engines in other processes."""
        parts = {**self.resident, **self.working}
        return sum(size for name, size in parts.items() if name not in ENGINE_PARTS)


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a model together."""

    count: int
    per_node: int | None
    """None if the nodes have different numbers of ranks."""
    gpu_bytes: float


def models_of(config: Planned) -> dict[str, str]:
    """Return the path of each model of a job, by the option that names it."""
    found = {"model.path": config.model.path}
    if isinstance(config, PpoConfig) and "critic" in config.roles and config.critic.path is not None:
        found["critic.path"] = config.critic.path
    if isinstance(config, DpoConfig) and config.ref.path is not None:
        found["ref.path"] = config.ref.path
    if isinstance(config, DistillConfig | PpoConfig) and config.teacher.path is not None:
        found["teacher.path"] = config.teacher.path
    if isinstance(config, PpoConfig | GenerateConfig) and config.reward.model is not None:
        found["reward.model"] = config.reward.model
    return found


def computed_here(config: Planned) -> dict[str, bool]:
    """Return the options of the models that training's own code computes, and whether it uses their LM heads."""
    by_engine = isinstance(config, GenerateConfig) and not engine_spec(config).in_process
    return {
        key: key not in ("critic.path", "reward.model") and not (key == "model.path" and isinstance(config, RmConfig))
        for key in models_of(config)
        if key != "model.path" or not by_engine
    }


@dataclass(frozen=True)
class PlacedModel:
    """A model, and the most ranks of a node that hold parts of it."""

    held: ShardedModel
    on_node: int
    pool: str = ""
    tokens: int = 0
    """Tokens of a micro-batch, if the model is trained."""


def placed_models(config: Planned, shapes: Shapes, gpu_bytes: float) -> list[PlacedModel]:
    """Return the models of a job without the engine's, and without a frozen one beside fine-tuning."""
    if isinstance(config, FinetuneConfig):
        ranks = _finetune_ranks(config, gpu_bytes)
        policy, tokens = _policy(config, shapes, gpu_bytes), micro_tokens(config, ranks.count)
        return [PlacedModel(policy, ranks.per_node or ranks.count, tokens=tokens)]
    found = []
    for role, held in _held_by_role(config, shapes, gpu_bytes).items():
        pool = pool_of(config, role)
        sizes = pool_spec(config)[pool]
        tokens = micro_tokens(config, sum(sizes)) if isinstance(config, PpoConfig) and held.trained else 0
        found.append(PlacedModel(held, max(sizes), pool, tokens))
    return found


def phases(config: Planned, shapes: Shapes, gpu_bytes: float) -> list[Phase]:
    """Return the phases of a job, in their order in a step.

    Args:
        gpu_bytes: memory of one GPU, on which the automatic choice of the sharding depends.
    """
    if isinstance(config, FinetuneConfig):
        return list(_finetune_phases(config, shapes, gpu_bytes))
    return list(_pooled_phases(config, shapes, gpu_bytes))


def micro_tokens(config: FinetuneConfig | PpoConfig, ranks: int) -> int:
    """Return the most tokens of a micro-batch on one rank: the limit, or fewer if its part of a batch is smaller."""
    size = config.trainer.sequence_parallel
    return -(-_row_tokens(config, max(1, ranks // size)) // size)


def _row_tokens(config: FinetuneConfig | PpoConfig, groups: int) -> int:
    """Return the most tokens of a packed row, if the batch is divided among so many sequence groups."""
    if not config.trainer.packing:
        return config.data.longest
    if isinstance(config, PpoConfig):
        items = config.actor.mini_batch_size or config.data.train_batch_size * config.rollout.n
    else:
        items = config.data.train_batch_size
    return min(config.trainer.row_tokens, -(-items // groups) * config.data.longest)


def _finetune_phases(config: FinetuneConfig, shapes: Shapes, gpu_bytes: float) -> Iterator[Phase]:
    policy, ranks = _policy(config, shapes, gpu_bytes), _finetune_ranks(config, gpu_bytes)
    tokens = micro_tokens(config, ranks.count)
    held, whole = {"model": policy.computing}, {"model": policy.states}
    other = _frozen_beside(config, shapes, ranks)
    if other is not None:
        name, frozen, stays = other
        if stays:
            held[name] = whole[name] = frozen.states
            policy = replace(policy, beside_head=frozen.gathered_root if name == "teacher" else 0.0)
        else:
            yield Phase(name, {name: frozen.states}, frozen.forward(tokens), computes=True)
    yield Phase("load", whole, {})
    yield Phase("update", held, policy.update(tokens), computes=True)
    yield Phase("save", whole, {})


def _frozen_beside(config: FinetuneConfig, shapes: Shapes, ranks: Ranks) -> tuple[str, ShardedModel, bool] | None:
    """Return name and model of a reference or a teacher, and whether it stays in memory during training."""
    if isinstance(config, DpoConfig) and config.algorithm.loss not in NEEDS_NO_REFERENCE:
        if config.model.lora.is_used and config.ref.path is None:
            return None  # the model without its adapters
        shape = shapes[config.ref.path or config.model.path]
        frozen = replace(_frozen(shape, "logprobs", config.trainer, ranks), longest=config.data.longest)
        return "reference", frozen, not config.ref.precompute_logprobs
    if isinstance(config, DistillConfig) and config.teacher.ranks_per_node is None:
        shape = shapes[config.teacher.path]
        frozen = replace(_frozen(shape, "logprobs", config.trainer, ranks), longest=config.data.longest)
        return "teacher", frozen, not config.teacher.precompute_top_k
    return None


def _policy(config: FinetuneConfig, shapes: Shapes, gpu_bytes: float) -> ShardedModel:
    head: Head = "value" if isinstance(config, RmConfig) else "loss"
    if isinstance(config, DpoConfig | DistillConfig):
        head = "logprobs"
    ranks = _finetune_ranks(config, gpu_bytes)
    policy = _trained(shapes[config.model.path], head, config.model, config.optim, config.trainer, ranks)
    return replace(policy, longest=config.data.longest)


def _finetune_ranks(config: FinetuneConfig, gpu_bytes: float) -> Ranks:
    trainer = config.trainer
    per_node = trainer.n_gpus_per_node
    if isinstance(config, DistillConfig) and config.teacher.ranks_per_node is not None:
        per_node -= config.teacher.ranks_per_node
    return Ranks(trainer.nnodes * per_node, per_node, gpu_bytes)


def _pooled_phases(config: PpoConfig | GenerateConfig, shapes: Shapes, gpu_bytes: float) -> Iterator[Phase]:
    every = _held_by_role(config, shapes, gpu_bytes)
    for pool, sizes in pool_spec(config).items():
        held = {role: model for role, model in every.items() if pool_of(config, role) == pool}
        for phase in _pool_phases(config, shapes, gpu_bytes, held, pool_of_engines(config) == pool, sum(sizes)):
            yield replace(phase, pool=pool if config.pools.spec else "")


def _pool_phases(
    config: PpoConfig | GenerateConfig,
    shapes: Shapes,
    gpu_bytes: float,
    held: Mapping[Role, ShardedModel],
    has_engine: bool,
    ranks: int,
) -> Iterator[Phase]:
    states: Parts = {role: model.waiting for role, model in held.items()}
    awake: Parts = {ENGINE: engine_bytes(config, shapes, gpu_bytes, shared=bool(held))} if has_engine else {}
    sleeps = bool(awake and held) and not engine_spec(config).in_process
    resident = states | ({SLEEPING: ENGINE_BYTES} if sleeps else {})

    def computing(role: Role) -> Parts:
        return resident | {role: held[role].computing}

    if held:
        yield Phase("load", *_one_whole(resident, held))
    if has_engine:
        yield Phase("generation", states, awake)
    if not isinstance(config, PpoConfig):
        if "reward" in held:
            rows = config.trainer.row_tokens if config.trainer.packing else config.data.longest
            working = held["reward"].forward(rows)
            yield Phase("reward model", computing("reward"), working, computes=True)
        return
    tokens = micro_tokens(config, ranks)
    names: dict[Role, str] = {
        "actor": "log-probabilities",
        "ref": "reference",
        "teacher": "teacher",
        "critic": "values",
        "reward": "reward model",
    }
    for role, name in names.items():
        if role in held:
            yield Phase(name, computing(role), held[role].forward(tokens), computes=True)
    learners: list[Role] = [role for role in ("critic", "actor") if role in held]
    for role in learners:
        yield Phase(f"update of the {role}", computing(role), held[role].update(tokens), computes=True)
    if "actor" in held:
        yield Phase("weight sync", states | {"actor": held["actor"].computing}, _sync(config, held["actor"], awake))
    if learners:
        yield Phase("save", *_one_whole(resident, {role: held[role] for role in learners}))


def _one_whole(resident: Parts, held: Mapping[Role, ShardedModel]) -> tuple[Parts, Parts]:
    """Return what is resident and what exists beside it while each of some models in turn is on the GPU as a whole,
    to be loaded or saved."""
    extra = {role: model.states - model.waiting for role, model in held.items()}
    role = max(extra, key=lambda role: extra[role])
    return resident, {f"all of the {role}": extra[role]} if extra[role] else {}


def _sync(config: PpoConfig, actor: ShardedModel, awake: Parts) -> Parts:
    """Return what exists while engines receive weights: a bucket, a whole tensor, and the weights of an engine that
    shares the GPU."""
    shape = actor.shape
    if config.model.lora.is_used and not config.rollout.merge_lora:
        whole = 0.0
    else:
        # transformers has the gate and up projections of all experts in one tensor; engines get a copy in parts.
        experts = max(layer.experts.weights if layer.experts else 0 for layer, _ in shape.kinds)
        linears = max(rows * columns for layer, _ in shape.kinds for _, rows, columns in layer.linears)
        whole = float(COMPUTE * max(shape.embedding, linears, 4 * experts / 3))
    own = 0.0 if engine_spec(config).in_process else ENGINE_BYTES
    found: Parts = {"a whole weight": whole, "buckets": 2e6 * config.rollout.sync_bucket_mb}
    return found | ({ENGINE_WEIGHTS: weights_of_engine(config, shape) + own} if awake else {})


def _held_by_role(config: PpoConfig | GenerateConfig, shapes: Shapes, gpu_bytes: float) -> dict[Role, ShardedModel]:
    """Return the models of all roles, without the engine's."""
    found: dict[Role, ShardedModel] = {}
    for role in config.roles:
        if role == "rollout":
            continue
        ranks = _pool_ranks(config, role, gpu_bytes)
        if isinstance(config, GenerateConfig):
            found[role] = _frozen(shapes[str(config.reward.model)], "value", None, ranks)
        elif role in ("actor", "critic"):
            is_actor = role == "actor"
            path = config.model.path if is_actor else config.critic.path or config.model.path
            head: Head = "logprobs" if is_actor else "value"
            optim = config.actor.optim if is_actor else config.critic.optim
            found[role] = _trained(shapes[path], head, config.model, optim, config.trainer, ranks)
        else:
            paths = {"ref": config.model.path, "teacher": config.teacher.path, "reward": config.reward.model}
            scores: Head = "value" if role == "reward" else "logprobs"
            found[role] = _frozen(shapes[str(paths[role])], scores, config.trainer, ranks)
    return {role: replace(model, longest=config.data.longest) for role, model in found.items()}


def _pool_ranks(config: PpoConfig | GenerateConfig, role: Role, gpu_bytes: float) -> Ranks:
    sizes = pool_spec(config)[pool_of(config, role)]
    return Ranks(sum(sizes), sizes[0] if len(set(sizes)) == 1 else None, gpu_bytes)


def _trained(
    shape: Shape, head: Head, model: ModelConfig, optim: OptimConfig, trainer: TrainingConfig, ranks: Ranks
) -> ShardedModel:
    itemsize = 4 if model.dtype == "float32" else 2
    adapters = adapter_parameters(shape, model.lora) if model.lora.is_used else 0
    total = shape.total_as_classifier if head == "value" else shape.total
    state_bytes = itemsize * total + STATE_BYTES * adapters if adapters else STATE_BYTES * total
    sharding, shards = _division(trainer.sharding, state_bytes, ranks)
    return ShardedModel(
        shape,
        itemsize,
        head,
        sharding,
        shards,
        recompute=model.enable_gradient_checkpointing,
        inputs_on_host=model.enable_activation_offload,
        adapters=adapters,
        saved=_saved(shape, total, itemsize, model.lora) if optim.moments == "8bit" else 0.0,
        four_bit=model.lora.quantize is not None,
        offload=trainer.offload,
        split=trainer.sequence_parallel,
        ranks=ranks.count,
    )


def _frozen(shape: Shape, head: Head, trainer: TrainingConfig | None, ranks: Ranks) -> ShardedModel:
    """Return a model without gradients, which GPUs hold in bfloat16."""
    requested = "full" if trainer is None else trainer.sharding
    sharding, shards = _division(requested, COMPUTE * shape.total, ranks)
    offload = "none" if trainer is None else trainer.offload
    return ShardedModel(shape, COMPUTE, head, sharding, shards, trained=False, offload=offload, ranks=ranks.count)


def _division(requested: str, state_bytes: int, ranks: Ranks) -> tuple[Sharding, int]:
    """Return the sharding of a model, and how many ranks together hold it once."""
    chosen: str = requested
    if requested == "auto":
        chosen = auto_sharding(state_bytes, ranks.count, ranks.per_node, int(ranks.gpu_bytes))
    if chosen == "gradients" and ranks.count == 1:
        return "none", 1
    if chosen == "hybrid" and ranks.per_node is not None:
        return "hybrid", min(ranks.per_node, ranks.count)
    return chosen, 1 if chosen == "none" else ranks.count  # type: ignore[return-value]  # a value of trainer.sharding


def adapter_parameters(shape: Shape, lora: LoraConfig) -> int:
    """Return the parameters of the adapters of all layers."""
    return sum(layers * math.prod(sizes) for layers, sizes in _adapter_matrices(shape, lora))


def _adapter_matrices(shape: Shape, lora: LoraConfig) -> list[tuple[int, tuple[int, int]]]:
    """Return the matrices of the adapters: the number of layers that have one, and its rows and columns. Adapters to
    continue from count as rank 32."""
    every = [(name, count, sizes) for layer, count in shape.kinds for name, *sizes in layer.linears]
    rank, targets = lora.rank or 32, lora.target_modules or [name for name, _, _ in every]
    chosen = [found for found in every if any(found[0] in target for target in targets)]
    chosen = chosen or every  # names of another family
    return [(layers, matrix) for _, layers, (rows, columns) in chosen for matrix in ((rank, columns), (rows, rank))]


def _saved(shape: Shape, total: int, itemsize: int, lora: LoraConfig) -> float:
    """Return the bytes that 8 bits save in each moment of a model, as if all its matrices had rows of H values, or of
    its adapters."""
    if lora.is_used:
        matrices = _adapter_matrices(shape, lora)
        return sum(layers * math.prod(sizes) * saved_by_eight_bits(sizes, FLOAT32) for layers, sizes in matrices)
    in_matrices = total - sum(count * layer.vectors for layer, count in shape.kinds) - shape.hidden
    return in_matrices * saved_by_eight_bits((shape.vocabulary, shape.hidden), itemsize)
