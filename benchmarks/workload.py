"""The measured work: GSM8K's lengths, a small Qwen2-style model, and the state of the trainer for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.finetune import FinetuneConfig, FinetuneTrainerConfig
from hpc_rl.config.training.preferences import RmConfig
from hpc_rl.config.training.sft import DataConfig, SftConfig
from hpc_rl.data.lazy import Item, sizes_of
from hpc_rl.data.order import Position
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.objectives import objective_of
from hpc_rl.finetune.trainer import TrainerState
from hpc_rl.finetune.training_data import Epochs
from hpc_rl.liveness.walltime import unlimited
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.checkpoints.saver import OneModel, Saver
from hpc_rl.training.models.attention import packed_attention
from hpc_rl.training.models.causal_lm import CausalLM, PackedModel, count_flops
from hpc_rl.training.models.scalar_model import ScoreModel
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel import sharding
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload
from hpc_rl.training.stopping import Stopping

# (prompt, response) tokens of GSM8K's training rows at 64 quantiles of their sum: ChatML template, byte-level BPE with
# 4,096 entries trained on the same rows. Their mean is 173 tokens, like the mean of all 7,473 rows.
# fmt: off
GSM8K_LENGTHS = [
    (32, 48), (45, 42), (50, 43), (43, 54), (44, 57), (56, 48), (56, 50), (67, 42), (42, 70), (57, 57), (60, 56),
    (68, 51), (60, 61), (55, 68), (65, 60), (61, 66), (56, 73), (75, 56), (59, 74), (61, 74), (71, 66), (58, 81),
    (51, 90), (69, 74), (66, 79), (74, 74), (55, 95), (64, 88), (79, 75), (54, 103), (62, 97), (92, 69), (77, 86),
    (81, 85), (87, 81), (56, 115), (83, 91), (52, 124), (71, 108), (77, 104), (64, 120), (73, 114), (66, 124),
    (76, 117), (94, 102), (67, 132), (149, 53), (68, 137), (65, 144), (129, 84), (93, 124), (88, 133), (87, 139),
    (94, 138), (122, 115), (79, 163), (120, 129), (117, 138), (129, 133), (91, 181), (116, 168), (102, 197),
    (124, 195), (109, 258),
]
# fmt: on


def samples(count: int, vocabulary: int, all_targets: bool, seed: int = 0) -> list[Sample]:
    """Make samples of random tokens with GSM8K's lengths.

    Args:
        all_targets: whether the loss is on every token but the first; otherwise it is only on the response.
    """
    rng = np.random.default_rng(seed)
    made = []
    for prompt, response in rng.choice(np.array(GSM8K_LENGTHS), count):
        mask = np.arange(prompt + response) >= (1 if all_targets else prompt)
        made.append(Sample(rng.integers(0, vocabulary, prompt + response, dtype=np.int32), mask))
    return made


def qwen2_config(vocabulary: int) -> Qwen2Config:
    """Return 4 layers of hidden size 256: 4.0M parameters with a vocabulary of 4,096 and tied embeddings."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )


def random_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Make a model with random weights, the same in each call."""
    torch.manual_seed(0)
    own = copy.deepcopy(config)  # a model stores its attention there
    return cast(PreTrainedModel, AutoModelForCausalLM.from_config(own, attn_implementation=attention))


def random_classifier(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Make a sequence classifier with one output and random weights, the same in each call."""
    torch.manual_seed(0)
    own = copy.deepcopy(config)
    own.num_labels, own.pad_token_id = 1, 0
    return cast(PreTrainedModel, AutoModelForSequenceClassification.from_config(own, attn_implementation=attention))


def sft_config(batch_size: int, trainer: FinetuneTrainerConfig, **model: Any) -> SftConfig:
    return SftConfig(
        model=ModelConfig(path="random", **model),
        data=DataConfig(train_files=["random.jsonl"], train_batch_size=batch_size),
        trainer=trainer,
    )


def trainer_state(
    config: PretrainedConfig, data: Sequence[Item], settings: FinetuneConfig, world: World, folder: Path
) -> TrainerState:
    """Build what `hpc_rl.finetune.trainer.load` returns, from random weights and items instead of files."""
    packed_attention.register()
    is_scalar = isinstance(settings, RmConfig)
    with world.device:
        hf = (random_classifier if is_scalar else random_model)(config, packed_attention.ATTENTION).train()
    model: PackedModel = (ScoreModel if is_scalar else CausalLM)(hf)
    model.prepare_training(settings.model)
    flops = count_flops(model)
    model = sharding.shard(model, world, settings.trainer)
    run = RunDir(folder)
    optimizer = build_optimizer(model, settings.optim)
    return TrainerState(
        config=settings,
        objective=objective_of(settings),
        run=run,
        world=world,
        model=model,
        optimizer=optimizer,
        offload=ModelOffload(settings.trainer.offload, model, optimizer),
        flops=flops,
        data=Epochs(data, settings),
        val=[],
        val_sizes=sizes_of([]),
        total_steps=10**6,
        tracker=Tracker(settings, run, None, is_main=False),
        saver=Saver(run.checkpoints, OneModel(model, optimizer, None, world), world, keep=1),
        stopping=Stopping(run, settings.slurm.warning_s, job_end=unlimited),
        step=0,
        position=Position(),
        total_tokens=0,
    )
