"""The memory of rollout engines: weights, the cache of keys and values, and the states of sequences."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.pools import pool_of
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import OWN_GPU, SHARED_GPU, engine_dtype, engine_spec
from hpc_rl.plan.gpu_memory import COMPUTE, FLOAT32
from hpc_rl.plan.shape import Shape

ENGINE_BYTES = 2e9
"""Assumed: what vLLM needs beside weights and cache, such as CUDA graphs; it keeps about as much when it sleeps."""
_NEUTRAL = {"gpu_memory_utilization", "disable_cascade_attn", "enforce_eager", "enable_prefix_caching", "seed"}
"""Arguments of vLLM with which weights and cache of an engine are as planned."""
Shapes = Mapping[str, Shape]
"""Path of a model, as in the configuration -> its shape."""


def pool_of_engines(config: PpoConfig | GenerateConfig) -> str | None:
    """Return the pool of a job's own engines; None if other jobs lend all of them."""
    is_lent = isinstance(config, PpoConfig) and config.rollout.engines == "lent"
    return None if is_lent else pool_of(config, "rollout")


def engine_bytes(config: PpoConfig | GenerateConfig, shapes: Shapes, gpu_bytes: float, shared: bool) -> float:
    """Return what an engine takes of a GPU while it generates. An engine in the training processes takes its weights
    and, assumed, the cache of one response; another one takes a fixed part of the GPU.

    Args:
        shared: whether training workers use the GPU too.
    """
    rollout, shape = config.rollout, shapes[config.model.path]
    if engine_spec(config).in_process:
        return weights_of_engine(config, shape) + cache_of(shape, config.data.longest)
    own = rollout.engine_kwargs.get(engine_spec(config).memory_argument)
    stated = own if isinstance(own, float) else rollout.gpu_memory_utilization
    return (stated or (SHARED_GPU if shared else OWN_GPU)) * gpu_bytes


def cache_of(shape: Shape, length: int, itemsize: int = COMPUTE, gpus: int = 1) -> float:
    """Return the bytes on one GPU that an engine keeps of a sequence: keys and values of its tokens, of those in the
    window of layers with one, and the states of layers that have them.

    Args:
        gpus: those of an engine, which divide key heads and states. Each has all of a latent cache.
    """
    found = 0.0
    for one in shape.attentions:
        tokens = min(length, one.window or length)
        found += tokens * one.cached * itemsize / (1 if one.latent else min(gpus, one.key_heads))
    # Engines keep states in the type of the model or, of Mamba and linear attention, in float32.
    states = sum(FLOAT32 * m.state + itemsize * m.convolution for layer in shape.layers if (m := layer.mixer))
    return found + states / gpus


def cache_tokens(
    config: PpoConfig | GenerateConfig, shapes: Shapes, gpu_bytes: float, is_lent: bool = False
) -> float | None:
    """Return how many tokens of the longest sequences an engine's cache can hold; negative if its weights do not fit.

    Args:
        is_lent: whether the engine is on a GPU of another job.

    Returns:
        None if the engine's own arguments determine it.
    """
    shape, rollout = shapes[config.model.path], config.rollout
    if engine_spec(config).in_process or rollout.engine_kwargs.keys() - _NEUTRAL:
        return None
    shared = any(pool_of(config, role) == pool_of(config, "rollout") for role in config.roles if role != "rollout")
    rest = engine_bytes(config, shapes, gpu_bytes, shared and not is_lent) - ENGINE_BYTES
    rest -= weights_of_engine(config, shape)
    longest = config.data.longest
    return rest * longest / cache_of(shape, longest, gpus=rollout.tensor_parallel_size)


def weights_of_engine(config: PpoConfig | GenerateConfig, shape: Shape) -> float:
    """Return the bytes of an engine's weights on one GPU."""
    itemsize = FLOAT32 if engine_dtype(config.rollout, config.trainer.computes_on) == "float32" else COMPUTE
    return itemsize * shape.total / config.rollout.tensor_parallel_size
