"""Tokens/s and MFU of supervised fine-tuning on CUDA devices: `python -m benchmarks.sft_gpu`.

The trainer's own optimizer steps on random weights of Qwen3's shapes: 0.6B with 8k packed tokens per micro-batch, and
4B with 16k. bfloat16 arithmetic on float32 weights, AdamW, loss on every token, four micro-batches per rank and step.
Each shape is measured with samples of GSM8K's lengths, and with samples that fill the whole micro-batch. The second is
what the anchors measured: prime-rl's published figures for these shapes, on one H100 (0.6B) and on eight H200 (4B),
with recomputation and FlashAttention 3. prime-rl counts half of the operations of attention, because of the mask. Here
all are counted, and its MFU (16.8 % and 28.4 %) is converted to this count.
The goals are at least 35 % MFU for 0.6B and 50 % for 4B, with less memory than the anchors.

It needs the `train` extra, but no data and no network. `HPC_RL_GROUP_DIR=$(mktemp -d) torchrun --nproc-per-node 8 -m
benchmarks.sft_gpu` uses several devices. `--recompute` turns on activation checkpointing, for devices that cannot hold
64 GB of weights, gradients and optimizer state of the 4B model in addition to its activations; `--compile` compiles the
layers. `--device cpu --shape tiny` tests the benchmark itself and only prints.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, Qwen3Config

from benchmarks.common import median, publish, table
from benchmarks.workload import qwen2_config, samples, sft_config, trainer_state
from hpc_rl.config.training.finetune import FinetuneTrainerConfig
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.trainer import step
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock

MICRO_BATCHES = 4
MEAN_LENGTH = 173
WARM_UP = 3
VOCABULARY = 151_936
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


@dataclass(frozen=True)
class Setting:
    """One shape, and what it is compared with."""

    micro_tokens: int
    anchor: str = ""
    goal_mfu: float | None = None


SETTINGS = {
    "0.6B": Setting(8_192, "26,005 tokens/s, 24.2 % MFU, 34.0 GB on 1 H100", 0.35),
    "4B": Setting(16_384, "39 % MFU on 8 H200", 0.50),
    "tiny": Setting(1_024),
}
LENGTHS = ("GSM8K", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SETTINGS), nargs="+", default=list(SHAPES))
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=list(LENGTHS), help="lengths of the samples")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="layers compiled by torch.compile")
    parser.add_argument("--steps", type=int, default=10, help="steps that count, after the warm-up")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.sft_gpu: torch does not find a CUDA device")
    world = distributed.start(arguments.device, 60)
    model = {"enable_gradient_checkpointing": arguments.recompute, "use_torch_compile": arguments.compile}
    compiled = ", compiled" if arguments.compile else ""
    results = {
        f"{shape}, {lengths}{compiled}": measure(shape, lengths, world, arguments.steps, **model)
        for shape in arguments.shape
        for lengths in arguments.lengths
    }
    distributed.finish()
    if world.rank != 0:
        return
    text = table(["shape, lengths", "tokens/s per device", "MFU", "goal", "peak GB", "anchor"], rows(results))
    if arguments.device == "cpu":
        print(text)
    else:
        publish("sft_gpu", text, {"devices": world.size, **results}, ["torch", "transformers"])


def rows(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return a row for each shape and kind of lengths, with the anchor and the goal of the shape."""
    made = []
    for name, found in results.items():
        setting = SETTINGS[name.partition(",")[0]]
        mfu = f"{found['perf/mfu']:.1%}" if "perf/mfu" in found else "device unknown"
        goal = f"{setting.goal_mfu:.0%}" if setting.goal_mfu is not None else ""
        speed, memory = f"{found['perf/throughput']:,.0f}", f"{found['perf/max_memory_gb']:.1f}"
        made.append([name, speed, mfu, goal, memory, setting.anchor])
    return made


def measure(shape: str, lengths: str, world: World, steps: int, **model: bool) -> dict[str, float]:
    """Return the medians of the trainer's own metrics over optimizer steps.

    Args:
        steps: how many of them count, after the warm-up.
        model: options of `model`.
    """
    micro_tokens = SETTINGS[shape].micro_tokens
    of_one_rank = micro_tokens * MICRO_BATCHES // (MEAN_LENGTH if lengths == "GSM8K" else micro_tokens)
    batch = of_one_rank * world.size
    config = shape_config(shape)
    count = batch * (WARM_UP + steps)
    data = (
        samples(count, config.vocab_size, all_targets=True)
        if lengths == "GSM8K"
        else full_samples(count, micro_tokens, config.vocab_size)
    )
    trainer = FinetuneTrainerConfig(device=world.device.type, micro_tokens=micro_tokens)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        state = trainer_state(config, data, sft_config(batch, trainer, **model), world, Path(folder))
        measured = [step(state, Clock()) for _ in range(WARM_UP + steps)][WARM_UP:]
    del state
    gc.collect()  # reference cycles would keep memory until the next measurement
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    keys = [key for key in ("perf/throughput", "perf/mfu", "perf/max_memory_gb") if key in measured[0]]
    return {key: median([metrics[key] for metrics in measured]) for key in keys}


def shape_config(shape: str) -> PretrainedConfig:
    if shape == "tiny":
        return qwen2_config(512)
    return Qwen3Config(
        vocab_size=VOCABULARY, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **SHAPES[shape]
    )


def full_samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Make samples of random tokens that have this length, with the loss on every token but the first."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= 1
    return [Sample(rng.integers(0, vocabulary, length, dtype=np.int32), mask) for _ in range(count)]


if __name__ == "__main__":
    main()
