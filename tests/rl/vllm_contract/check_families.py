"""vLLM's classes of models take the weights that a trainer sends, by their names: each family, without computing it.

What the kernels of a platform do to weights after they were loaded is left out: it needs compiled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.vllm.settings import engine_settings
from hpc_rl.rl.rollout.vllm.worker import WeightUpdates
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.rl.weights.buckets import pack
from hpc_rl.training.models.causal_lm import load_model
from hpc_rl.training.models.pretrained import _UNUSED
from hpc_rl.training.models.stored_form import StoredForm
from tests.rl.vllm_contract.stand_ins import stand_in
from tests.small_models.families import FAMILIES, make_model

stand_in()
ROOM = 42
"""Tokens of a prompt and its response."""
BUCKET_BYTES = 20_000
UNCHECKED = {
    **dict.fromkeys(("bamba", "minimax"), "are refused"),
    **dict.fromkeys(("olmo_hybrid", "kimi_linear"), "need Triton or cutlass"),
    "nemotron_h": "has experts whose activation has no gate, which vLLM refuses to build for CPUs",
}
"""Families whose classes cannot be built here -> why."""


class Worker(WeightUpdates):
    """Has of vLLM's worker what an update through host memory needs."""

    def __new__(cls, *_: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, config: Any, model: nn.Module) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.model_runner = SimpleNamespace(device=torch.device("meta"))
        self.get_model = lambda: model


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    place = tmp_path_factory.mktemp("store") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


def build(folder: Path) -> tuple[Any, nn.Module]:
    """Return vLLM's configuration of a model, and the model without values."""
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    rollout = RolloutConfig.model_validate({"max_num_seqs": 8, "dtype": "float32"})
    settings = engine_settings(
        ModelConfig(path=str(folder)), rollout, AutoConfig.from_pretrained(folder), ROOM, 0, Placement("cpu")
    )
    config = EngineArgs(**settings).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(config)
    record_metadata_for_reloading(model)
    return config, model


def changed(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Return what a trainer sends: other weights than those in the folder."""
    hf = load_model(ModelConfig(path=str(folder)), ROOM, packing=False).hf
    names = hf.state_dict().keys()
    generator = torch.Generator().manual_seed(3)
    for weight in (*hf.parameters(), *(buffer for name, buffer in hf.named_buffers() if name in names)):
        weight.data.add_((torch.randn(weight.shape, generator=generator) * 0.05).to(weight.dtype))
    found = WeightSource(hf, torch.float32, stored=StoredForm(hf))
    return [(name, weight.detach().clone()) for name, weight in found]


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in UNCHECKED])
@torch.no_grad()
def test_each_weight_arrives(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is then what it would be if vLLM had read them from files, under the names of the policy's files."""
    from vllm.model_executor.model_loader.reload import layerwise

    monkeypatch.setattr(layerwise, "QuantizeMethodBase", type("NoMethod", (), {}))
    monkeypatch.setattr(layerwise, "is_deferred_attention_layer", lambda _: False)
    folder = make_model(tmp_path, kind)
    weights = changed(folder)
    files = load_file(folder / "model.safetensors")
    assert {name: weight.shape for name, weight in weights} == {
        name: weight.shape for name, weight in files.items() if not _UNUSED.search(name)
    }
    config, model = build(folder)
    model.load_weights(iter(weights))
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    for weight in model.parameters():
        weight.fill_(torch.nan)
    worker = Worker(config, model)
    for _ in range(2):
        worker.start_host_update()
        for bucket in pack(weights, BUCKET_BYTES):
            worker.load_host_bucket(bucket)
        assert worker.finish_host_update() == []
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert {name for name, weight in found.items() if not torch.equal(weight, expected[name])} == set()
