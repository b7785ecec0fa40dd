"""vLLM accepts the arguments of the engine: on a pretended H100, up to the place where the engine would start."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.vllm.caches import visible_devices
from hpc_rl.rl.rollout.vllm.settings import WORKER_EXTENSION, engine_settings
from tests.helpers import make_tiny_model
from tests.rl.vllm_contract.h100 import pretend_h100

pretend_h100()

PLACEMENTS = {
    "own GPU": Placement("cuda", "nccl"),
    "shared GPU": Placement("cuda", "ipc", sleeps=True, gpu_share=0.5),
    "several GPUs": Placement("cuda", "nccl", bundles=(0, 1)),
    "adapters only": Placement("cuda", "host", sleeps=True, gpu_share=0.5, adapters={"r": 9}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("contract") / "model"))


class Reached(Exception):
    """Raised where vLLM would start the engine."""


@pytest.mark.parametrize("name", PLACEMENTS)
def test_vllm_accepts_the_arguments(name: str, model: str) -> None:
    """LLM builds its EngineArgs, which refuse unknown names, and these a configuration, which refuses wrong values."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    placement = PLACEMENTS[name]
    start = mock.create_autospec(LLMEngine.from_engine_args, side_effect=Reached)
    with mock.patch.object(LLMEngine, "from_engine_args", start), pytest.raises(Reached):
        LLM(**settings_of(model, placement))
    config = start.call_args.kwargs["engine_args"].create_engine_config()
    parallel = len(placement.bundles) or 1
    assert config.parallel_config.tensor_parallel_size == parallel
    assert config.parallel_config.distributed_executor_backend == ("ray" if parallel > 1 else "uni")
    assert config.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"
    assert config.parallel_config.worker_extension_cls == WORKER_EXTENSION
    assert config.cache_config.gpu_memory_utilization == (0.5 if placement.sleeps else 0.9)
    assert config.cache_config.enable_prefix_caching
    assert (config.model_config.enable_sleep_mode, config.model_config.dtype) == (placement.sleeps, torch.bfloat16)
    assert (config.model_config.seed, config.model_config.max_model_len) == (1, 256)
    assert config.model_config.logprobs_mode == "raw_logprobs" and config.model_config.skip_tokenizer_init
    assert config.scheduler_config.max_num_seqs == 256
    if placement.adapters is None:
        assert config.weight_transfer_config.backend == placement.transfer
    else:
        assert config.lora_config.max_lora_rank == 16 and config.lora_config.lora_dtype == torch.bfloat16


def test_folders_of_caches_are_named_by_torchs_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph names the device by the number that torch gives it, which depends on what the process sees."""
    from vllm.platforms import interface
    from vllm.platforms.cuda import CudaPlatformBase

    from tests.rl.rollout.pretended_gpus import CUDA

    for seen, numbers in ((None, [6, 4]), ("", [6, 4]), ("4,5,6,7", [2, 0]), ("7,6,5,4", [1, 3])):
        monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert visible_devices([6, 4]) == numbers
    assert {name: getattr(CudaPlatformBase, name) for name in CUDA} == CUDA


def test_vllm_knows_the_arguments_for_cpus(model: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert settings_of(model, Placement("cpu", "host")).keys() <= names


def settings_of(model: str, placement: Placement) -> dict[str, Any]:
    from transformers import AutoConfig

    rollout = RolloutConfig(tensor_parallel_size=len(placement.bundles) or 1)
    return engine_settings(
        ModelConfig(path=model), rollout, AutoConfig.from_pretrained(model), 256, seed=1, placement=placement
    )
