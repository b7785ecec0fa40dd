"""Which roles a reinforcement-learning run has, and where they live; pure functions of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpc_rl.config.schema import PpoConfig, Role, RolloutConfig

DEFAULT_POOL = "global_pool"


def roles_in_use(config: PpoConfig) -> list[Role]:
    """Roles that the algorithm needs: no critic without GAE, no reference without a KL term."""
    roles: list[Role] = ["actor"]
    if config.algorithm.advantage == "gae":
        roles.append("critic")
    if config.algorithm.kl.where != "none":
        roles.append("ref")
    if config.reward.model is not None:
        roles.append("reward")
    return [*roles, "rollout"]


def pool_spec(config: PpoConfig) -> dict[str, list[int]]:
    """GPUs on each node of each pool."""
    trainer = config.trainer
    return config.pools.spec or {DEFAULT_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}


def pool_of(config: PpoConfig, role: Role) -> str:
    """The pool of a role; the first one where none is named."""
    return config.pools.roles.get(role) or next(iter(pool_spec(config)))


def engine_name(config: PpoConfig) -> Literal["hf", "vllm"]:
    """The rollout engine that `auto` stands for."""
    if config.rollout.name != "auto":
        return config.rollout.name
    return "vllm" if config.trainer.device == "cuda" else "hf"


def engine_dtype(rollout: RolloutConfig, device: str) -> str:
    """What rollout.dtype stands for: torch's name of a type."""
    if rollout.dtype != "auto":
        return rollout.dtype
    return "bfloat16" if device == "cuda" else "float32"


def problems(config: PpoConfig) -> list[str]:
    """What fits the schema key by key and cannot work together, a line each."""
    return [*_batch_problems(config), *_pool_problems(config), *_algorithm_problems(config)]


def _batch_problems(config: PpoConfig) -> list[str]:
    found = []
    responses = config.data.train_batch_size * config.rollout.n
    size = config.actor.mini_batch_size
    if size is not None and responses % size:
        divisors = [n for n in range(1, responses + 1) if responses % n == 0]
        below = max(n for n in divisors if n < size)
        above = min((n for n in divisors if n > size), default=None)
        nearest = f"nearest that do are {below} and {above}" if above else f"largest that does is {below}"
        found.append(
            f"actor.mini_batch_size {size} does not divide the {responses} responses of a step "
            f"(data.train_batch_size {config.data.train_batch_size} x rollout.n {config.rollout.n}): the {nearest}"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > config.trainer.micro_tokens:
        found.append(
            f"data.max_prompt_length {config.data.max_prompt_length} + data.max_response_length "
            f"{config.data.max_response_length} is over trainer.micro_tokens {config.trainer.micro_tokens}: a sample "
            "is never split, so raise micro_tokens or lower the lengths"
        )
    if config.algorithm.overlong_buffer > config.data.max_response_length:
        found.append(
            f"algorithm.overlong_buffer {config.algorithm.overlong_buffer} is over data.max_response_length "
            f"{config.data.max_response_length}"
        )
    return found


def _pool_problems(config: PpoConfig) -> list[str]:
    found = []
    spec, trainer = pool_spec(config), config.trainer
    unit = "GPUs" if trainer.device == "cuda" else "CPU slots"
    for role, pool in config.pools.roles.items():
        if pool not in spec:
            found.append(f"pools.roles.{role} is {pool}, and the pools are {', '.join(spec)}")
    if found:
        return found
    unused = [name for name in spec if not any(pool_of(config, role) == name for role in roles_in_use(config))]
    found += [f"pool {name} has no role: name it in pools.roles, or leave it out" for name in unused]
    asked, there = sum(map(sum, spec.values())), trainer.nnodes * trainer.n_gpus_per_node
    largest = max(max(sizes) for sizes in spec.values())
    if asked > there or largest > trainer.n_gpus_per_node:
        needs = "; ".join(f"pool {name} needs {' + '.join(map(str, sizes))} {unit}" for name, sizes in spec.items())
        found.append(
            f"{needs}; the job has {trainer.nnodes} x {trainer.n_gpus_per_node} "
            "(trainer.nnodes x trainer.n_gpus_per_node), and an entry of a pool is on one node"
        )
    parallel = config.rollout.tensor_parallel_size
    if parallel > 1 and engine_name(config) == "hf":
        found.append(
            f"rollout.tensor_parallel_size {parallel} is for vllm alone: set rollout.name=vllm, or leave it at 1"
        )
        return found
    if parallel > 1 and config.pools.strategy == "PACK":
        found.append(f"pools.strategy=PACK may tear the {parallel} GPUs of an engine apart: use STRICT_PACK")
    name = pool_of(config, "rollout")
    odd = [n for n in spec[name] if n % parallel]
    if odd:
        found.append(
            f"rollout.tensor_parallel_size {parallel} does not divide the {odd[0]} {unit} per node of pool {name}"
        )
    return found


def _algorithm_problems(config: PpoConfig) -> list[str]:
    found = []
    algorithm, n = config.algorithm, config.rollout.n
    if algorithm.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline") and n < 2:
        found.append(
            f"algorithm.advantage={algorithm.advantage} compares responses to the same prompt, and rollout.n is {n}: "
            "set rollout.n to 2 or more"
        )
    if algorithm.filter_groups and n < 2:
        found.append(f"algorithm.filter_groups compares responses to the same prompt, and rollout.n is {n}")
    if algorithm.filter_groups and algorithm.advantage == "remax":
        found.append("algorithm.filter_groups is for several responses per prompt, remax for one and a greedy one")
    if algorithm.advantage == "gae" and config.critic.enable is False:
        found.append("algorithm.advantage=gae needs the critic that critic.enable=false leaves out")
    if algorithm.advantage != "gae" and config.critic.enable:
        found.append(f"critic.enable=true, but algorithm.advantage={algorithm.advantage} has no use for a critic")
    if algorithm.kl.target is not None and algorithm.kl.where != "reward":
        found.append("algorithm.kl.target adapts the KL penalty in the reward: set algorithm.kl.where=reward")
    if algorithm.kl.where == "loss" and algorithm.kl.estimator == "k1":
        found.append("algorithm.kl.estimator=k1 has no gradient on average: with kl.where=loss take k2 or k3")
    steps = config.trainer.total_training_steps
    if "critic" in roles_in_use(config) and steps is not None and config.critic.warmup_steps >= steps:
        found.append(
            f"critic.warmup_steps {config.critic.warmup_steps} leaves the policy none of the "
            f"trainer.total_training_steps {steps}"
        )
    return found
