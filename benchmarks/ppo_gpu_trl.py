"""TRL's GRPO in benchmarks/ppo_gpu.py: vLLM in the trainer's process, asleep during the updates, bfloat16.

It imports nothing of hpc-rl, because it may run in an environment of its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

MICRO_BATCH = 8
"""Responses per forward and backward pass: TRL's default."""


def measure(folder: str, algorithm: str, work: str, output: str) -> None:
    """Train with TRL, and write the seconds of each step."""
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    assert algorithm == "grpo"
    size: dict[str, Any] = json.loads(work)
    steps: list[dict[str, float]] = []

    class Seconds(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            memory = torch.cuda.max_memory_allocated() / 1e9
            steps.append({"perf/time_per_step": time.perf_counter() - self.start, "perf/max_memory_gb": memory})

    policy = Path(folder) / "policy"
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    tokenizer.eos_token = tokenizer.pad_token  # required; generation ignores it
    lines = (Path(folder) / "prompts.jsonl").read_text().splitlines()
    with tempfile.TemporaryDirectory() as runs:
        config = GRPOConfig(
            output_dir=runs,
            bf16=True,
            learning_rate=size["lr"],
            lr_scheduler_type="constant",
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=size["responses"] // MICRO_BATCH,
            num_generations=size["samples"],
            max_completion_length=size["response_tokens"],
            max_steps=size["steps"],
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.5,
            vllm_enable_sleep_mode=True,
            generation_kwargs={"ignore_eos": True},
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=str(policy),
            reward_funcs=share_of_digits,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": [json.loads(line)["prompt"] for line in lines]}),
            processing_class=tokenizer,
            callbacks=[Seconds()],
        ).train()
    Path(output).write_text(json.dumps(steps))


def share_of_digits(completions: list[str], **_columns: object) -> list[float]:
    return [sum(map(str.isdigit, completion)) / max(1, len(completion)) for completion in completions]
