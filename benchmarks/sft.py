"""Supervised fine-tuning compared with TRL, a plain loop, and the processor's limit: `python -m benchmarks.sft`.

One thread, float32, the same model, GSM8K's lengths, the same tokens per optimizer step; all measured in turns. Seconds
are processor seconds of the one thread, which equal wall seconds on an idle machine and remain meaningful on a busy
one. The last row is not training: it is the number of floating-point operations that a step needs, at the speed of a
bare 1024 x 1024 matrix product. Per step these are

    6 * body * tokens  +  6 * hidden * vocabulary * targets  +  6 * layers * hidden * sum(length ** 2)

with `body` the weights outside of the embeddings: two operations per weight and token in the forward pass and four in
the backward pass; the LM head for each target; attention for each pair of a token and an earlier one.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.common import in_turns, median, median_ratio, publish, table
from benchmarks.workload import qwen2_config, random_model, samples, sft_config, trainer_state
from hpc_rl.config.training.finetune import FinetuneTrainerConfig
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.trainer import TrainerState, step
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock

WORK = {4096: (5, 3), 151_936: (3, 1)}
"""Vocabulary -> repeats, and optimizer steps in each: a step takes seconds with the first, a minute with the second."""
BATCH = 24  # samples per optimizer step: about 4,100 tokens, four of TRL's packed rows
LR = 1e-5
OURS, PLAIN, PRODUCT = "hpc-rl", "plain loop over single samples", "same operations as a bare product"
TUNED = "TRL, packing, no recomputation"
TRL: dict[str, dict[str, Any]] = {
    "TRL": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": BATCH // 8},
    "TRL, packing": {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    TUNED: {
        "packing": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": False,
    },
}
"""TRL's own settings except for float32; the third row also turns off activation checkpointing, its default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--repeats", type=int, help="turns of each variant (default: 5, and 3 of the large vocabulary)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    for vocabulary in arguments.vocabulary:
        results = {
            f"vocabulary {vocabulary:,}, loss on {targets}": measure(
                vocabulary, targets == "all tokens", arguments.repeats or WORK[vocabulary][0]
            )
            for targets in ("all tokens", "responses")
        }
        text = "\n\n".join(f"{name}\n\n{as_table(rates)}" for name, rates in results.items())
        publish(f"sft_{vocabulary}", text, results, ["torch", "transformers", "trl", "accelerate"])


def measure(vocabulary: int, all_targets: bool, repeats: int) -> dict[str, list[float]]:
    """Return the target tokens per second of every variant."""
    steps = WORK[vocabulary][1]
    data = samples(BATCH * steps, vocabulary, all_targets)
    config = qwen2_config(vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        settings = sft_config(BATCH, FinetuneTrainerConfig(device="cpu", micro_tokens=2048))
        state = trainer_state(config, data, settings, World(0, 1, torch.device("cpu")), Path(folder))
        plain = PlainLoop(random_model(config, "sdpa"))
        shared = random_model(config, "sdpa")
        variants: dict[str, Callable[[], float]] = {OURS: lambda: ours(state, steps)}
        for name, options in TRL.items():
            if steps == 1 and name == TUNED:
                continue  # not faster than the second row, and takes minutes
            variants[name] = partial(trl, shared, data, options, steps, folder)
        variants[PLAIN] = lambda: plain.rate(data)
        variants[PRODUCT] = lambda: bare_product() * count(data) / operations(data, shared)
        ours(state, 1)
        plain.rate(data[:BATCH])
        return in_turns(variants, repeats)


def ours(state: TrainerState, steps: int) -> float:
    start, targets = time.process_time(), 0.0
    for _ in range(steps):
        targets += step(state, Clock())["train/target_tokens"]
    return targets / (time.process_time() - start)


class PlainLoop:
    """A loop without a library: sample by sample, with accumulated gradients."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def rate(self, data: Sequence[Sample]) -> float:
        start = time.process_time()
        for first in range(0, len(data), BATCH):
            batch = data[first : first + BATCH]
            for sample in batch:
                ids = torch.from_numpy(sample.input_ids).long()
                labels = torch.where(torch.from_numpy(sample.loss_mask), ids, -100)
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
                loss = cross_entropy(logits[:-1], labels[1:], reduction="sum") / count(batch)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return count(data) / (time.process_time() - start)


class Stopwatch(TrainerCallback):
    """Measures from the start of the first optimizer step to the end of the last one."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.end = 0.0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.begins.append(time.process_time())

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.end = time.process_time()

    @property
    def seconds(self) -> float:
        return self.end - self.begins[0]


def trl(model: PreTrainedModel, data: Sequence[Sample], settings: Mapping[str, Any], steps: int, folder: str) -> float:
    """Return the target tokens per second of optimizer steps, without loading and packing the data set."""
    columns = {
        "input_ids": [sample.input_ids.tolist() for sample in data],
        "labels": [
            torch.where(torch.from_numpy(s.loss_mask), torch.from_numpy(s.input_ids), -100).tolist() for s in data
        ],
    }
    watch = Stopwatch()
    config = SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        learning_rate=LR,
        max_steps=steps,
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer(),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    labels = [label for row in trainer.train_dataset["labels"][: rows * steps] for label in row]
    trainer.train()
    return sum(label != -100 for label in labels) / watch.seconds


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer for the padding token that TRL needs; the samples are already tokens."""
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), pad_token="<pad>", eos_token="<eos>"
    )


def bare_product() -> float:
    """Return the operations per second of a 1024 x 1024 float32 product, over about 0.5 s."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    out, done, start = left @ right, 0, time.process_time()
    while time.process_time() - start < 0.5:
        torch.mm(left, right, out=out)
        done += 1
    return done * 2 * 1024**3 / (time.process_time() - start)


def operations(data: Sequence[Sample], model: PreTrainedModel) -> float:
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head  # tied to the input embeddings
    lengths = [len(sample.input_ids) for sample in data]
    attention = config.num_hidden_layers * config.hidden_size * sum(length**2 for length in lengths)
    return 6.0 * (body * sum(lengths) + head * count(data) + attention)


def count(data: Sequence[Sample]) -> int:
    """Return the number of target tokens."""
    return sum(int(sample.loss_mask.sum()) for sample in data)


def as_table(rates: dict[str, list[float]]) -> str:
    rows = [
        [name, f"{median(values):,.0f}", "" if name == OURS else f"{median_ratio(rates[OURS], values):.2f}"]
        for name, values in rates.items()
    ]
    return table(["", "target tokens/s", "hpc-rl against it"], rows)


def quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()


if __name__ == "__main__":
    main()
