"""The arguments of vllm.LLM (https://docs.vllm.ai/en/latest/configuration/engine_args/)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpc_rl.config.rl.rollout import OWN_GPU, SHARED_GPU, EngineConfig, engine_dtype
from hpc_rl.config.training.common import ModelSource
from hpc_rl.formats.model_kind import has_mixers
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.vllm.adapters import engine_rank

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LONGER_WINDOWS = ("cohere2", "cohere2_moe")
"""model_type of models whose windows have one token more in vLLM than in transformers."""
WORKER_EXTENSION = "hpc_rl.rl.rollout.vllm.worker.WeightUpdates"
CPU_BLOCK = 128
"""Tokens per block of the key-value cache on CPUs."""
CPU_CACHE_BYTES = 4 << 30
"""Most memory for the cache on CPUs. If all sequences together need more, vLLM lets some of them wait."""


def engine_settings(
    model: ModelSource,
    rollout: EngineConfig,
    config: PretrainedConfig,
    max_length: int,
    seed: int,
    placement: Placement,
    truncated_logprobs: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vllm.LLM. rollout.engine_kwargs take precedence over all others.

    Args:
        truncated_logprobs: see Sampling.
    """
    tensor_parallel = rollout.tensor_parallel_size
    settings = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": engine_dtype(rollout, placement.device),
        "max_model_len": max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel,
        "enable_prefix_caching": True,
        # Its raw ones are those at temperature 1, before top_k and top_p; its processed ones those after all of them.
        "logprobs_mode": "processed_logprobs" if rollout.temperature != 1 or truncated_logprobs else "raw_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        # Requests are tokens. The parts of a model that read images take no memory, and need no new weights.
        "language_model_only": True,
    }
    text = config.get_text_config()
    if text.model_type in _LONGER_WINDOWS and text.sliding_window:
        settings["hf_overrides"] = {"sliding_window": text.sliding_window - 1}
    if placement.device == "cpu":
        settings |= {
            "enforce_eager": True,
            # After a part of a prompt, vLLM restores the offset of the request's generator. CPU generators have none.
            "enable_chunked_prefill": False,
            # Only chunks of prompts leave states in the cache.
            "enable_prefix_caching": not has_mixers(config.to_dict()),
            "kv_cache_memory_bytes": _cpu_cache_bytes(config, rollout, max_length),
            "distributed_executor_backend": "mp" if tensor_parallel > 1 else "uni",
        }
    else:
        settings |= {
            "gpu_memory_utilization": rollout.gpu_memory_utilization
            or (SHARED_GPU if placement.gpu_share < 1 else OWN_GPU),
            "enable_sleep_mode": placement.sleeps,
            "distributed_executor_backend": "ray" if tensor_parallel > 1 else "uni",
        }
    if placement.transfer != "host":
        settings["weight_transfer_config"] = {"backend": placement.transfer}
    if placement.adapters is not None:
        settings |= {"enable_lora": True, "max_lora_rank": engine_rank(placement.adapters["r"])}
    return settings | rollout.engine_kwargs


def _cpu_cache_bytes(config: PretrainedConfig, rollout: EngineConfig, max_length: int) -> int:
    """Return the memory for keys and values of max_num_seqs sequences of max_length, at most CPU_CACHE_BYTES."""
    text = config.get_text_config()
    # Layers of Gemma 4 differ in these, and its configuration refuses to name one number.
    given = text.to_dict()
    heads = given.get("num_key_value_heads") or text.num_attention_heads
    head_size = given.get("head_dim") or text.hidden_size // text.num_attention_heads
    itemsize = getattr(torch, engine_dtype(rollout, "cpu")).itemsize
    per_token = 2 * text.num_hidden_layers * heads * head_size * itemsize
    blocks = -(-max_length // CPU_BLOCK) + 1
    # vLLM reserves one block.
    return min(CPU_CACHE_BYTES, (rollout.max_num_seqs * blocks + 1) * CPU_BLOCK * per_token)
