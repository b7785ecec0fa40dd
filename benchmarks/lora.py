"""Training of adapters compared with peft, and the size of their checkpoints: `python -m benchmarks.lora`.

One thread, float32, the same model, GSM8K's lengths, the same tokens per optimizer step; all measured in turns. peft
runs in a plain loop over single samples, without padding, with the same optimizer; and its layers run in our own
training loop, which shows the part of the adapters alone. Seconds are processor seconds of the one thread.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.nn.functional import cross_entropy

from benchmarks.common import in_turns, median, median_ratio, publish, table
from benchmarks.workload import qwen2_config, random_model, samples, sft_config, trainer_state
from hpc_rl.config.training.common import LoraConfig, OptimConfig
from hpc_rl.config.training.finetune import FinetuneTrainerConfig
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.trainer import TrainerState, step
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.models import loading, lora
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock

VOCABULARY = 4096
BATCH = 24  # samples per optimizer step: about 4,100 tokens
RANK, ALPHA = 16, 32.0
LR = 1e-5
STEPS = 2
OURS, LAYERS, PLAIN, WHOLE = "hpc-rl", "peft's layers in hpc-rl", "peft, plain loop", "hpc-rl, all weights"
ALONE = World(0, 1, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    data = samples(BATCH * STEPS, VOCABULARY, all_targets=True)
    with tempfile.TemporaryDirectory() as folder:
        states = {name: state_of(name, data, Path(folder)) for name in (OURS, LAYERS, WHOLE)}
        plain = PlainLoop()
        variants = {name: (lambda state=state: rate_of(state)) for name, state in states.items()}
        variants[PLAIN] = lambda: plain.rate(data)
        for state in states.values():
            step(state, Clock())
        plain.rate(data[:BATCH])
        rates = in_turns(variants, repeats)
        sizes = {name: checkpoint_bytes(states[name], Path(folder) / name) for name in (OURS, WHOLE)}
    names = (OURS, PLAIN, LAYERS, WHOLE)
    speed = table(
        ["", "tokens/s", "hpc-rl against it"],
        [
            [
                name,
                f"{median(rates[name]):,.0f}",
                "" if name == OURS else f"{median_ratio(rates[OURS], rates[name]):.2f}",
            ]
            for name in names
        ],
    )
    size = table(["checkpoint", "MB"], [[name, f"{found / 1e6:.1f}"] for name, found in sizes.items()])
    results = {"tokens per second": rates, "bytes of a checkpoint": sizes}
    publish("lora", f"{speed}\n\n{size}", results, ["torch", "transformers", "peft", "accelerate"])


def state_of(name: str, data: Sequence[Sample], folder: Path) -> TrainerState:
    """Build a training run whose model has our adapters, peft's, or none."""
    settings = sft_config(BATCH, FinetuneTrainerConfig(device="cpu", micro_tokens=2048))
    state = trainer_state(qwen2_config(VOCABULARY), data, settings, ALONE, folder)
    if name == OURS:
        config = LoraConfig(rank=RANK, alpha=ALPHA)
        state.model.adapters = lora.add_adapters(state.model.hf, config, "random")
        loading.set_adapters(state.model, seed=1)
    elif name == LAYERS:
        peft.inject_adapter_in_model(peft_config(), state.model.hf)
    state.optimizer = build_optimizer(state.model, OptimConfig(lr=LR))
    return state


def peft_config() -> Any:
    return peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


def rate_of(state: TrainerState) -> float:
    """Return tokens per second of some optimizer steps."""
    start, tokens = time.process_time(), state.total_tokens
    for _ in range(STEPS):
        step(state, Clock())
    return (state.total_tokens - tokens) / (time.process_time() - start)


class PlainLoop:
    """A loop around a model of peft: sample by sample, with accumulated gradients."""

    def __init__(self) -> None:
        self.model = peft.get_peft_model(random_model(qwen2_config(VOCABULARY), "sdpa"), peft_config()).train()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, fused=True)

    def rate(self, data: Sequence[Sample]) -> float:
        start = time.process_time()
        for first in range(0, len(data), BATCH):
            batch = data[first : first + BATCH]
            targets = sum(len(sample.input_ids) - 1 for sample in batch)
            for sample in batch:
                ids = torch.from_numpy(sample.input_ids).long()
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
                (cross_entropy(logits[:-1], ids[1:], reduction="sum") / targets).backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return sum(len(sample.input_ids) for sample in data) / (time.process_time() - start)


def checkpoint_bytes(state: TrainerState, folder: Path) -> int:
    """Return the size of weights and optimizer state in a checkpoint."""
    model_state.write(folder, model_state.snapshot(state.model, state.optimizer, None, ALONE, copy=False), ALONE)
    return sum(file.stat().st_size for file in folder.glob("*.distcp"))


if __name__ == "__main__":
    main()
