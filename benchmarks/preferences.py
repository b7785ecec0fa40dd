"""DPO and reward models compared with TRL: `python -m benchmarks.preferences`.

One thread, float32, the same model, pairs with GSM8K's lengths (one prompt, two responses), the same pairs per step;
all measured in turns. The reference's log-probabilities are computed before the measurement in all variants. Seconds
are processor seconds of the one thread. Before anything is measured, loss and gradients of one batch are compared with
TRL's.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TQDM_DISABLE"] = "1"

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedModel, PrinterCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from benchmarks.common import in_turns, median, median_ratio, publish, table
from benchmarks.sft import LR, Stopwatch, quiet, tokenizer
from benchmarks.workload import GSM8K_LENGTHS, qwen2_config, random_classifier, random_model, trainer_state
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.finetune import FinetuneConfig, FinetuneTrainerConfig
from hpc_rl.config.training.preferences import DpoConfig, PreferenceDataConfig, RewardDataConfig, RmConfig
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.pair_batch import pack_preferences, response_logprobs
from hpc_rl.finetune.trainer import TrainerState, step
from hpc_rl.training.models.attention import packed_attention
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock

WORK = {4096: (5, 2), 151_936: (3, 1)}
"""Vocabulary -> repeats, and optimizer steps in each."""
BATCH = 12
"""Pairs per optimizer step: 24 samples, about 4,100 tokens."""
OURS, RECOMPUTED, STORED = "hpc-rl", "TRL", "TRL, no recomputation"
TRL: dict[str, dict[str, Any]] = {RECOMPUTED: {}, STORED: {"gradient_checkpointing": False}}
"""TRL's own settings except for float32; the second row also turns off activation checkpointing, its default."""
TOLERANCE = 1e-5
"""Largest difference from TRL: of the loss, relative; of the gradient, its norm relative to that of the gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--repeats", type=int, help="turns of each variant (default: 5, and 3 of the large vocabulary)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    for vocabulary in arguments.vocabulary:
        repeats = arguments.repeats or WORK[vocabulary][0]
        found = {f"{kind}, vocabulary {vocabulary:,}": measure(kind, vocabulary, repeats) for kind in ("dpo", "rm")}
        text = "\n\n".join(f"{name}\n\n{as_table(rates)}" for name, (rates, _) in found.items())
        results = {name: rates for name, (rates, _) in found.items()}
        differences = {name: off for name, (_, off) in found.items()}
        packages = ["torch", "transformers", "trl", "accelerate"]
        publish(f"preferences_{vocabulary}", text, results, packages, {"relative difference from TRL": differences})


def measure(kind: str, vocabulary: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the pairs per second of every variant, and the differences from TRL before the measurement."""
    steps = WORK[vocabulary][1]
    config = qwen2_config(vocabulary)
    data = pairs(BATCH * steps, vocabulary)
    settings = settings_of(kind)
    if kind == "dpo":
        packed_attention.register()
        data = with_reference(data, random_model(config, packed_attention.ATTENTION))
    with tempfile.TemporaryDirectory() as folder:
        state = trainer_state(config, data, settings, World(0, 1, torch.device("cpu")), Path(folder))
        shared = random_model(config, "sdpa") if kind == "dpo" else random_classifier(config, "sdpa")
        first = data[:BATCH]
        off = compare(state, trl_trainer(kind, copy.deepcopy(shared), first, 1, folder, TRL[STORED]), first)
        variants: dict[str, Callable[[], float]] = {OURS: partial(ours, state, steps)}
        for name, options in TRL.items():
            if steps == 1 and name == RECOMPUTED:
                continue  # slower, and takes minutes
            variants[name] = partial(theirs, kind, shared, data, steps, folder, options)
        ours(state, 1)
        return in_turns(variants, repeats), off


def settings_of(kind: str) -> FinetuneConfig:
    model, trainer = ModelConfig(path="random"), FinetuneTrainerConfig(device="cpu", micro_tokens=2048)
    names: dict[str, Any] = {"train_files": ["random.jsonl"], "train_batch_size": BATCH}
    if kind == "dpo":
        return DpoConfig(model=model, data=PreferenceDataConfig(**names), trainer=trainer)
    return RmConfig(model=model, data=RewardDataConfig(**names), trainer=trainer)


def pairs(count: int, vocabulary: int) -> list[Preference]:
    """Make pairs of random tokens: a prompt and a response with GSM8K's lengths, and a second response."""
    rng = np.random.default_rng(0)
    made = []
    for (prompt, chosen), (_, rejected) in rng.choice(np.array(GSM8K_LENGTHS), (count, 2)):
        asked = rng.integers(1, vocabulary, prompt, dtype=np.int32)
        answers = [rng.integers(1, vocabulary, length, dtype=np.int32) for length in (chosen, rejected)]
        samples = [
            Sample(np.concatenate([asked, answer]), np.arange(prompt + len(answer)) >= prompt) for answer in answers
        ]
        made.append(Preference(tuple(samples), (0.0,)))
    return made


def with_reference(data: Sequence[Preference], hf: PreTrainedModel) -> list[Preference]:
    """Add the log-probabilities of a reference."""
    model = CausalLM(hf)
    with torch.no_grad():
        return [
            replace(one, ref_logprobs=tuple(response_logprobs(model, pack_preferences([one], width=2))[0].tolist()))
            for one in data
        ]


def ours(state: TrainerState, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        step(state, Clock())
    return BATCH * steps / (time.process_time() - start)


class TokenisedDPOTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's trainer with a data set that is tokenized already, which its RewardTrainer accepts by itself."""

    def _prepare_dataset(self, dataset: datasets.Dataset, *args: object, **kwargs: object) -> datasets.Dataset:
        return dataset


def trl_trainer(
    kind: str, model: PreTrainedModel, data: Sequence[Preference], steps: int, folder: str, options: dict[str, Any]
) -> Any:
    """Return TRL's trainer for `steps` optimizer steps."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "learning_rate": LR,
        "max_steps": steps,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": BATCH // 3,
        "gradient_accumulation_steps": 3,
        **options,
    }
    prompts = [one.samples[0].input_ids[~one.samples[0].loss_mask].tolist() for one in data]
    whole = [[sample.input_ids.tolist() for sample in one.samples] for one in data]
    if kind == "rm":
        columns = {"chosen_ids": [chosen for chosen, _ in whole], "rejected_ids": [rejected for _, rejected in whole]}
        trainer = RewardTrainer(
            model=model,
            args=RewardConfig(**settings),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer(),
        )
    else:
        columns = {
            "prompt_ids": prompts,
            "chosen_ids": [chosen[len(p) :] for p, (chosen, _) in zip(prompts, whole, strict=True)],
            "rejected_ids": [rejected[len(p) :] for p, (_, rejected) in zip(prompts, whole, strict=True)],
        }
        trainer = TokenisedDPOTrainer(
            model=model,
            args=DPOConfig(precompute_ref_log_probs=True, **settings),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer(),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def theirs(
    kind: str, model: PreTrainedModel, data: Sequence[Preference], steps: int, folder: str, options: dict[str, Any]
) -> float:
    """Return TRL's pairs per second of optimizer steps, without the reference's pass over the data."""
    trainer, watch = trl_trainer(kind, model, data, steps, folder, options), Stopwatch()
    trainer.add_callback(watch)
    trainer.train()
    return BATCH * steps / watch.seconds


def compare(state: TrainerState, trainer: Any, data: Sequence[Preference]) -> dict[str, float]:
    """Compare loss and gradients of one batch with TRL's; print and return the differences.

    Raises:
        AssertionError: one of them is larger than TOLERANCE.
    """
    found = state.objective.loss(state.model, state.objective.collate(data), 1 / len(data))
    found.loss.backward()
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(data))])
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    mine, other = (
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        for model in (state.model.hf, trainer.model)
    )
    assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
    error = sum((mine[name] - other[name]).square().sum() for name in mine) ** 0.5
    norm = sum(gradient.square().sum() for gradient in other.values()) ** 0.5
    off = {"loss": abs(found.loss.item() / loss.item() - 1), "gradient": (error / norm).item()}
    print(f"# relative difference from TRL: loss {off['loss']:.1e}, gradient {off['gradient']:.1e}", flush=True)
    assert max(off.values()) <= TOLERANCE, off
    state.model.zero_grad(set_to_none=True)
    return off


def as_table(rates: dict[str, list[float]]) -> str:
    rows = [
        [name, f"{median(values):,.2f}", "" if name == OURS else f"{median_ratio(rates[OURS], values):.2f}"]
        for name, values in rates.items()
    ]
    return table(["", "pairs/s", "hpc-rl against it"], rows)


if __name__ == "__main__":
    main()
