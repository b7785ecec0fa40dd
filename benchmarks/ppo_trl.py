"""TRL in benchmarks/ppo.py: its own trainers and settings, except for float32 and no recomputation.

It waits between steps.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from benchmarks.ppo_turns import Pace
from benchmarks.ppo_workload import (
    CLIP_VALUE,
    KL_COEF,
    LR,
    POLICY,
    RESPONSE_TOKENS,
    RESPONSES,
    REWARD_MODEL,
    SAMPLES,
    VOCABULARY,
    read_prompts,
    score,
)

WARM_UP, MANY = 2, 10**6
MICRO_BATCH = 8
"""Responses per forward and backward pass: TRL's default, which is not slower than a larger number."""


class PacedCallback(TrainerCallback):
    def __init__(self) -> None:
        self._pace = Pace(WARM_UP)

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        if not self._pace.step_done({}):
            sys.exit(0)


def common(output: str, lr: float) -> dict[str, Any]:
    return {
        "output_dir": output,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": RESPONSES // MICRO_BATCH,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def tokenizer(folder: Path) -> Any:
    """Load the tokenizer with the end of sequence that TRL needs: a token that no model here can generate."""
    loaded = AutoTokenizer.from_pretrained(folder / POLICY, padding_side="left")
    loaded.eos_token = f"<{VOCABULARY}>"
    loaded.add_tokens(loaded.eos_token, special_tokens=True)
    assert loaded.eos_token_id >= VOCABULARY
    return loaded


def share_of_digits(completions: list[str], **_columns: object) -> list[float]:
    return [score(completion, None) for completion in completions]


def grpo(folder: Path, output: str, epochs: int) -> None:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        **common(output, LR["grpo"]),
        num_generations=SAMPLES["grpo"],
        num_iterations=epochs,
        max_completion_length=RESPONSE_TOKENS,
        max_steps=MANY,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / POLICY, dtype=torch.float32),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": read_prompts(folder)}),
        processing_class=tokenizer(folder),
        callbacks=[PacedCallback()],
    ).train()


def ppo(folder: Path, output: str, epochs: int) -> None:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    config = PPOConfig(
        **common(output, LR["ppo"]),
        num_ppo_epochs=epochs,
        total_episodes=MANY * RESPONSES,
        response_length=RESPONSE_TOKENS,
        temperature=1.0,
        kl_coef=KL_COEF,
        cliprange_value=CLIP_VALUE,
        num_sample_generations=0,
    )
    known = tokenizer(folder)
    prompts = [{"input_ids": known(prompt)["input_ids"]} for prompt in read_prompts(folder)]

    def scalar_model() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            folder / REWARD_MODEL, num_labels=1, dtype=torch.float32
        )

    PPOTrainer(
        args=config,
        processing_class=known,
        model=AutoModelForCausalLM.from_pretrained(folder / POLICY, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(folder / POLICY, dtype=torch.float32),
        reward_model=scalar_model(),
        value_model=scalar_model(),
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[PacedCallback()],
    ).train()


def main(folder: str, algorithm: str, epochs: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as output:
        {"grpo": grpo, "ppo": ppo}[algorithm](Path(folder), output, int(epochs))


if __name__ == "__main__":
    main(*sys.argv[1:])
