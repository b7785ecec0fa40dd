"""A model that computes with bfloat16 copies of its weights takes the same steps, bit by bit, as one in FSDP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from hpc_rl.config.training.common import ModelConfig, OptimConfig, TrainingConfig
from hpc_rl.config.training.preferences import DpoConfig
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.dpo import Dpo, Kto
from hpc_rl.finetune.reference import Reference
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.models.attention.packed_batch import PackedBatch, pack_samples
from hpc_rl.training.models.causal_lm import PackedModel, causal_lm, load_tokenizer
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.scalar_model import critic
from hpc_rl.training.optim import build_optimizer, clip_gradients
from hpc_rl.training.parallel import sharding
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload
from hpc_rl.training.parallel.sharding import own_part
from tests.helpers import make_tiny_model

ALONE = World(0, 1, torch.device("cpu"))
STEPS, MICRO_BATCHES = 3, 3
Step = Callable[[PackedModel, PackedBatch], torch.Tensor]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of a process group divides its models and computes in bfloat16, as on a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    monkeypatch.setattr(sharding, "is_sharded", lambda _: True)
    monkeypatch.setattr(sharding, "_policy", lambda *_: half)
    sharding._mesh.cache_clear()
    yield
    dist.destroy_process_group()


def language(model: PackedModel, batch: PackedBatch) -> torch.Tensor:
    loss: torch.Tensor = model(batch, lambda hidden, weight: cross_entropy_sum(hidden, weight, batch.targets_N))
    return loss / len(batch.rows)


def values(model: PackedModel, batch: PackedBatch) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - 1).square().mean()
    return loss


def preferred(loss: str) -> Step:
    """Return the loss of DPO or KTO, with the policy without its adapters as the reference, computed in each step."""
    data = {"train_files": ["d"], **({"label_key": "label"} if loss == "kto" else {})}
    options = {"model": {"path": "m", "lora": {"rank": 4}}, "data": data, "algorithm": {"loss": loss}}
    config = DpoConfig.model_validate(options)

    def step(model: PackedModel, batch: PackedBatch) -> torch.Tensor:
        objective = (Kto if loss == "kto" else Dpo)(config)
        objective._reference = Reference(model)  # type: ignore[arg-type]
        sample = Sample(np.arange(3, 12, dtype=np.int32), np.arange(9) > 3)
        other = Sample(np.arange(5, 12, dtype=np.int32), np.arange(7) > 3)
        items = objective.collate([Preference((sample, other), (1.0,))])
        found: torch.Tensor = objective.loss(model, items, 1.0).loss  # type: ignore[arg-type]
        return found

    return step


def row(number: int) -> PackedBatch:
    generator = np.random.default_rng(number)
    ids = [generator.integers(3, 300, size=size) for size in generator.integers(5, 12, size=4)]
    return pack_samples(ids, [np.arange(len(one)) > 1 for one in ids])


def load(folder: str, division: str, kind: Step, **options: Any) -> tuple[PackedModel, torch.optim.Optimizer]:
    config = ModelConfig.model_validate({"path": folder, **options})
    pretrained: Any = critic(folder, config) if kind is values else causal_lm(config)
    trainer = TrainingConfig.model_validate({"sharding": division})
    model = load_sharded(pretrained, ALONE, trainer)
    return model, build_optimizer(model, OptimConfig(lr=1e-2))


def train(model: PackedModel, optimizer: torch.optim.Optimizer, kind: Step, steps: range, division: str) -> list[float]:
    """Take steps; return the losses and the norms of the gradients, and the loss without gradients after each step."""
    trainer, found = TrainingConfig.model_validate({"sharding": division}), []
    for step in steps:
        for micro in range(MICRO_BATCHES):
            sharding.begin_micro_batch(model, trainer, last=micro == MICRO_BATCHES - 1)
            loss = kind(model, row(step * MICRO_BATCHES + micro))
            loss.backward()
            found.append(loss.item())
        sharding.reshard(model)
        found.append(clip_gradients(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            found.append(kind(model, row(0)).item())
        sharding.reshard(model)
    return found


CASES: dict[str, tuple[Step, dict[str, Any], dict[str, Any]]] = {
    "tied": (language, {"tie": True}, {"enable_gradient_checkpointing": True}),
    "qwen3": (language, {"kind": "qwen3", "num_attention_heads": 4}, {}),
    "critic": (values, {}, {}),
    "adapters": (language, {}, {"lora": {"rank": 4}}),
    "dpo": (preferred("sigmoid"), {}, {"lora": {"rank": 4}}),
    "kto": (preferred("kto"), {}, {"lora": {"rank": 4}}),
    "bfloat16": (language, {}, {"dtype": "bfloat16"}),
    "adapters, bfloat16": (language, {}, {"lora": {"rank": 4}, "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_fsdp(tmp_path: Path, as_on_a_gpu: None, name: str) -> None:
    kind, settings, options = CASES[name]
    folder = str(make_tiny_model(tmp_path, **settings))
    ours, theirs = (load(folder, division, kind, **options) for division in ("none", "full"))
    assert ours[0].compute_weights is not None and isinstance(theirs[0], FSDPModule)
    found = train(*ours, kind, range(STEPS), "none")
    assert found == train(*theirs, kind, range(STEPS), "full")
    assert len(set(found)) > STEPS
    for own, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(own, own_part(other))


def test_weights_are_float32_outside_of_passes_and_bfloat16_inside(tmp_path: Path, as_on_a_gpu: None) -> None:
    model, _ = load(str(make_tiny_model(tmp_path, tie=True)), "none", language)
    weight = model.hf.get_input_embeddings().weight
    parameters, batch = list(model.parameters()), row(0)

    def head(hidden: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
        inside = [parameter.dtype for parameter in model.parameters()]
        assert inside == [torch.bfloat16] * len(parameters)
        assert head_weight is model.hf.get_input_embeddings().weight
        assert torch.equal(head_weight, weight.bfloat16())
        return cross_entropy_sum(hidden, head_weight, batch.targets_N)

    model(batch, head).backward()
    copies = list(model.parameters())
    assert all(copy.grad is None for copy in copies)  # each gradient is in float32 as soon as it exists
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in parameters)
    sharding.reshard(model)
    assert all(own is parameter for own, parameter in zip(model.parameters(), parameters, strict=True))
    assert sum(copy.untyped_storage().nbytes() for copy in copies) == 0


@pytest.mark.parametrize(("first", "second"), [("none", "full"), ("full", "none"), ("none", "none")])
def test_a_checkpoint_continues_with_and_without_fsdp(
    tmp_path: Path, as_on_a_gpu: None, first: str, second: str
) -> None:
    folder, saved = str(make_tiny_model(tmp_path / "model")), tmp_path / "checkpoint"
    model, optimizer = load(folder, first, language)
    train(model, optimizer, language, range(2), first)
    language(model, row(0))  # a pass without `reshard`, such as a validation
    model_state.write(saved, model_state.snapshot(model, optimizer, load_tokenizer(source(folder)), ALONE, True), ALONE)
    sharding.reshard(model)
    expected = train(model, optimizer, language, range(2, 4), first)
    model, optimizer = load(folder, second, language)
    model_state.read(saved, model, optimizer, ALONE)
    assert train(model, optimizer, language, range(2, 4), second) == expected


def test_weights_and_moments_wait_in_host_memory(tmp_path: Path, as_on_a_gpu: None) -> None:
    folder = str(make_tiny_model(tmp_path))
    expected = train(*load(folder, "none", language), language, range(2), "none")
    model, optimizer = load(folder, "none", language)
    offload, found = ModelOffload("all", model, optimizer), []
    parameters = list(model.parameters())
    for step in range(2):
        assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == 0
        with offload.whole(changed=True):
            found += train(model, optimizer, language, range(step, step + 1), "none")
    assert found == expected


def test_compiled_layers_are_not_compiled_again(tmp_path: Path, as_on_a_gpu: None) -> None:
    """More layers than torch.compile's limit, and copies that come and go between steps."""
    folder = str(make_tiny_model(tmp_path, layers=10))
    plain = train(*load(folder, "none", language), language, range(2), "none")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=counter, fullgraph=True)):
        model, optimizer = load(folder, "none", language, use_torch_compile=True)
        found, graphs = [], []
        for step in range(2):
            found += train(model, optimizer, language, range(step, step + 1), "none")
            graphs.append(counter.frame_count)
    torch._dynamo.reset()
    assert found == pytest.approx(plain, rel=1e-2)
    assert 0 < graphs[0] == graphs[1] < 8  # torch.compile's limit: no layer and no step has a graph of its own


def source(folder: str) -> ModelConfig:
    return ModelConfig.model_validate({"path": folder})
