from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.vllm.settings import engine_settings
from tests.helpers import make_tiny_model


def test_settings_by_device(tmp_path: Path) -> None:
    model = ModelConfig(path=str(make_tiny_model(tmp_path / "model")))
    config = AutoConfig.from_pretrained(model.path)
    own = {"disable_cascade_attn": True, "max_model_len": 50}

    def settings(placement: Placement, truncated: bool = False, **options: Any) -> dict[str, Any]:
        rollout = RolloutConfig(tensor_parallel_size=2, engine_kwargs=own, **options)
        return engine_settings(model, rollout, config, 400, 1, placement, truncated)

    shared, separate = Placement("cuda", "ipc", sleeps=True, gpu_share=0.5), Placement("cuda", "nccl")
    cpu, cuda, alone = settings(Placement("cpu")), settings(shared), settings(separate)
    assert (cpu["dtype"], cpu["distributed_executor_backend"]) == ("float32", "mp")
    assert (cuda["dtype"], cuda["distributed_executor_backend"]) == ("bfloat16", "ray")
    assert cpu["kv_cache_memory_bytes"] == (256 * 5 + 1) * 128 * 2 * 2 * 32 * 4 // 2  # 2 layers, one head of 16
    assert cuda["weight_transfer_config"] == {"backend": "ipc"} and cuda["enable_sleep_mode"]
    assert (cuda["gpu_memory_utilization"], alone["gpu_memory_utilization"]) == (0.5, 0.9)
    for placement in (shared, separate):
        assert settings(placement, gpu_memory_utilization=0.3)["gpu_memory_utilization"] == 0.3
    modes = [settings(shared, cut, temperature=t)["logprobs_mode"] for t in (1, 0.5) for cut in (False, True)]
    assert modes == ["raw_logprobs", *["processed_logprobs"] * 3] and cpu["logprobs_mode"] == "raw_logprobs"
    assert not {"enable_sleep_mode", "gpu_memory_utilization", "weight_transfer_config"} & set(cpu)
    assert own.items() <= cpu.items() and own.items() <= cuda.items()


def test_windows_of_vllm_are_those_of_transformers(tmp_path: Path) -> None:
    """The table of docs/models.md compares log-probabilities."""
    for kind, expected in {"cohere2": {"hf_overrides": {"sliding_window": 4095}}, "mistral": {}}.items():
        config = AutoConfig.for_model(kind)
        found = engine_settings(ModelConfig(path=str(tmp_path)), RolloutConfig(), config, 400, 1, Placement("cuda"))
        assert {name: value for name, value in found.items() if name == "hf_overrides"} == expected


def test_states_are_not_cached_on_cpus(tmp_path: Path) -> None:
    """vLLM needs chunks of prompts for that, which are off on CPUs."""
    found = {}
    for kind, layers in {"qwen3": ["full_attention"] * 2, "lfm2": ["conv", "full_attention"]}.items():
        config = AutoConfig.for_model(kind, num_hidden_layers=2, layer_types=layers)
        for device in ("cpu", "cuda"):
            settings = engine_settings(
                ModelConfig(path=str(tmp_path)), RolloutConfig(), config, 400, 1, Placement(device)
            )
            found[kind, device] = settings["enable_prefix_caching"]
    assert [key for key, is_cached in found.items() if not is_cached] == [("lfm2", "cpu")]
