"""What an objective provides, and the metrics of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.sft import DataConfig, SftConfig
from hpc_rl.data.lazy import sizes_of
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.base import Work
from hpc_rl.finetune.sft import Sft
from hpc_rl.finetune.trainer import perf_metrics
from hpc_rl.training.models.attention.packed_attention import attention_kwargs
from hpc_rl.training.models.causal_lm import CausalLM, Flops, load_model
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock
from tests.helpers import make_tiny_model

SAMPLES = [
    Sample(np.array([5, 6, 7, 8], np.int32), np.array([False, False, True, True])),
    Sample(np.array([9, 10], np.int32), np.array([False, True])),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_model(ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model")))))


@pytest.fixture(scope="module")
def objective() -> Sft:
    return Sft(SftConfig(model=ModelConfig(path="unused"), data=DataConfig(train_files=["unused"])))


def test_losses_add_up_over_micro_batches(objective: Sft, model: CausalLM) -> None:
    whole, _ = objective.loss(model, objective.collate(SAMPLES), 0.5)
    parts = [objective.loss(model, objective.collate([sample]), 0.5).loss for sample in SAMPLES]
    torch.testing.assert_close(whole, sum(parts, torch.zeros(())))
    none, _ = objective.loss(model, objective.collate([]), 0.5)
    assert none.item() == 0
    none.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_the_supervised_loss_is_the_cross_entropy_of_the_targets(objective: Sft, model: CausalLM) -> None:
    expected = torch.zeros(())
    for sample in SAMPLES:
        ids = torch.from_numpy(sample.input_ids).long()
        alone = attention_kwargs(objective.collate([sample]))
        logits = model.hf(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], **alone)
        expected += cross_entropy(
            logits.logits[0, :-1][sample.loss_mask[1:]], ids[1:][sample.loss_mask[1:]], reduction="sum"
        )
    torch.testing.assert_close(objective.loss(model, objective.collate(SAMPLES), 2.0).loss, 2 * expected)


def test_the_metrics_of_a_step_count_all_ranks() -> None:
    work = Work.of(sizes_of(SAMPLES))
    assert (work.lengths, work.targets, work.tokens) == ([4, 2], 3, 6)
    clock = Clock()
    clock.seconds = {"timing_s/data": 0.5, "timing_s/forward_backward": 1.5}
    metrics = perf_metrics(work, clock, Flops(1, 1, 1), World(0, 4, torch.device("cpu")))
    assert metrics.pop("perf/max_memory_gb") > 0
    assert metrics == {"perf/time_per_step": 2.0, "perf/tokens_per_s": 3.0, "perf/throughput": 0.75}


def test_the_utilisation_compares_with_the_peak_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_rl.finetune.trainer.peak_flops", lambda _: 10.0)
    clock = Clock()
    clock.seconds = {"timing_s/step": 2.0}
    # 6 tokens * 3 + 3 targets * 5 + (16 + 4) squared tokens * 7 = 173 operations
    metrics = perf_metrics(Work.of(sizes_of(SAMPLES)), clock, Flops(3, 5, 7), World(0, 4, torch.device("cpu")))
    assert metrics["perf/mfu"] == pytest.approx(173 / 2 / 4 / 10)
