"""make demo: a small model learns sums by the main job, two nodes' worth of processes on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from transformers.utils import logging

from tests.helpers import make_tiny_model

FOLDER = Path("demo")
STEPS = 300
COMMAND = (
    *("submit", "sft", "--local", "--nodes", "2", "--run-dir", "demo/run"),
    *("trainer.device=cpu", "model.path=demo/model"),
    *("data.train_files=demo/data/train.jsonl", "data.val_files=demo/data/val.jsonl", "data.max_length=64"),
    *("data.train_batch_size=128", "optim.lr=2e-3", "trainer.sharding=gradients"),
    *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=100", "trainer.save_freq=150"),
)


def main() -> int:
    began = time.monotonic()
    logging.disable_progress_bar()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    print("1. A model with random weights, and sums to learn.", flush=True)
    make_tiny_model(FOLDER / "model", hidden=128, layers=3, tie=True)
    hpc_rl("data", "arithmetic", "--out", "demo/data")
    print(f"\n2. hpc-rl {' '.join(COMMAND)}\n", flush=True)
    hpc_rl(*COMMAND)
    before, after = (correct(folder) for folder in (FOLDER / "model", FOLDER / "run" / "model"))
    losses = [json.loads(line) for line in (FOLDER / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = [record["val/loss"] for record in losses if "val/loss" in record]
    print(f"\nSums answered right (greedy, unseen): {before:.0%} before, {after:.0%} after {STEPS} steps.")
    print(f"Validation loss: {validation[0]:.3f} at the first measurement, {validation[-1]:.3f} at the end.")
    print("Report: demo/run/report.html\nModel:  demo/run/model (loads with transformers and vLLM)")
    print(f"It took {time.monotonic() - began:.0f} s.")
    return 0


def hpc_rl(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).with_name("hpc-rl")), *arguments], check=True, timeout=600)


def correct(model_folder: Path) -> float:
    """Part of the validation questions that the model answers right, by greedy decoding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    rows = [json.loads(line) for line in (FOLDER / "data" / "val.jsonl").read_text().splitlines()]
    chats = [row["messages"][:1] for row in rows]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer.strip() == row["answer"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    sys.exit(main())
