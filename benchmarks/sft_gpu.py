"""Tokens/s and MFU of supervised fine-tuning on one CUDA device: `python -m benchmarks.sft_gpu`.

The trainer's own optimizer steps on random weights of Qwen3's 0.6B and 4B shapes: bfloat16 arithmetic on float32
weights, AdamW, micro-batches of 8k packed tokens of GSM8K's lengths, loss on every token, four micro-batches per step.
It needs the `train` extra, but no data and no network. `--recompute` turns on activation checkpointing, for devices
that cannot hold 64 GB of weights, gradients and optimizer state of the 4B model in addition to its activations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from benchmarks.common import median, publish, table
from benchmarks.workload import samples, sft_config, trainer_state
from hpc_rl.config.sft import SftTrainerConfig
from hpc_rl.finetune.trainer import step
from hpc_rl.training import distributed
from hpc_rl.training.distributed import World
from hpc_rl.training.perf import Clock

MICRO_TOKENS, MICRO_BATCHES = 8192, 4
MEAN_LENGTH = 173
WARM_UP, STEPS = 3, 10
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.sft_gpu: torch does not find a CUDA device")
    world = distributed.start("cuda", 60)
    results = {shape: measure(shape, world, arguments.recompute) for shape in arguments.shape}
    distributed.finish()
    rows = [
        [
            shape,
            f"{found['perf/tokens_per_s']:,.0f}",
            f"{found['perf/mfu']:.1%}" if "perf/mfu" in found else "device unknown",
            f"{found['perf/max_memory_gb']:.1f}",
        ]
        for shape, found in results.items()
    ]
    publish("sft_gpu", table(["shape", "tokens/s", "MFU", "peak GB"], rows), results, ["torch", "transformers"])


def measure(shape: str, world: World, recompute: bool) -> dict[str, float]:
    """Return the medians of the trainer's own metrics over STEPS optimizer steps."""
    config = Qwen3Config(
        vocab_size=151_936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **SHAPES[shape]
    )
    batch = MICRO_TOKENS * MICRO_BATCHES // MEAN_LENGTH
    trainer = SftTrainerConfig(device="cuda", micro_tokens=MICRO_TOKENS)
    data = samples(batch * (WARM_UP + STEPS), config.vocab_size, all_targets=True)
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        state = trainer_state(config, data, sft_config(batch, trainer, recompute), world, Path(folder))
        measured = [step(state, Clock()) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    del state
    torch.cuda.empty_cache()
    keys = [key for key in ("perf/tokens_per_s", "perf/mfu", "perf/max_memory_gb") if key in measured[0]]
    return {key: median([metrics[key] for metrics in measured]) for key in keys}


if __name__ == "__main__":
    main()
