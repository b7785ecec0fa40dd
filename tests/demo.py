"""make demo: a small model learns sums from careless solutions, then from rewards, on two nodes' worth of processes.

Most of the solutions forget to carry the one. Supervised training learns the mistake along with the sums; reinforcement
learning, which learns only whether an answer is right, undoes it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from hpc_rl.probes.tiny_model import make_tiny_model

FOLDER = Path("demo")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_start|>' }}{% endif %}{% endfor %}"
)
"""Question and answer without roles: half the tokens of ChatML in so short a chat."""
WORDS = ("What is ", " + ")
"""The words of every question, as a token each: a third fewer tokens."""
DATA = ("data.train_files=demo/data/train.jsonl", "data.val_files=demo/data/val.jsonl", "trainer.device=cpu")
SFT = (
    *("submit", "sft", "--local", "--nodes", "2", "--run-dir", "demo/sft", "model.path=demo/model", *DATA),
    *("data.max_length=32", "data.train_batch_size=256", "optim.lr=1e-3", "trainer.sharding=none"),
    *("trainer.total_training_steps=400", "trainer.test_freq=200"),
)
PPO = (
    *("submit", "ppo", "--local", "--nodes", "2", "--run-dir", "demo/ppo", "model.path=demo/sft/model", *DATA),
    *("data.max_prompt_length=24", "data.max_response_length=6", "reward.function=exact"),
    *("data.train_batch_size=128", "rollout.n=4", "actor.mini_batch_size=256", "trainer.sharding=none"),
    *("actor.optim.lr=3e-4", "actor.optim.lr_scheduler=linear", "critic.optim.lr=1e-3"),
    *("trainer.total_training_steps=60", "trainer.test_freq=30"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of data and training")
    seed = parser.parse_args().seed
    began = time.monotonic()
    logging.disable_progress_bar()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    print("1. A model with random weights, and sums with solutions that forget to carry in 70 % of the rows.")
    make_model(FOLDER / "model")
    hpc_rl(
        "data",
        "arithmetic",
        "--out",
        "demo/data",
        "--train",
        "8000",
        "--val",
        "80",
        "--careless",
        "0.7",
        "--seed",
        str(seed),
    )
    print(f"\n2. hpc-rl {' '.join(SFT)}\n", flush=True)
    hpc_rl(*SFT, f"trainer.seed={seed}")
    print(f"\n3. hpc-rl {' '.join(PPO)}\n", flush=True)
    hpc_rl(*PPO, f"trainer.seed={seed}")
    scores = [record["val/score"] for record in metrics("ppo") if "val/score" in record]
    print(f"\nUnseen sums answered right (greedy): {scores[0]:.1%} after SFT, {scores[-1]:.1%} after PPO.")
    print("Reports: demo/sft/report.html, demo/ppo/report.html")
    print("Model:   demo/ppo/model (loads with transformers and vLLM)")
    print(f"It took {time.monotonic() - began:.0f} s.")
    return 0


def make_model(folder: Path, words: Sequence[str] = WORDS, hidden: int = 128, layers: int = 3, **sizes: Any) -> None:
    make_tiny_model(folder, hidden=hidden, layers=layers, tie=True, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens(list(words))
    tokenizer.save_pretrained(folder)


def hpc_rl(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).with_name("hpc-rl")), *arguments], check=True, timeout=3600)


def metrics(run: str) -> list[dict[str, float]]:
    lines = (FOLDER / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
