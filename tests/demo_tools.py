"""make demo-tools: a small model learns from rewards to let a calculator compute sums, in conversations of two turns.

In most of the demonstrations the assistant gives up, and in some it calls the tool `add`. Supervised training learns
both; reinforcement learning finds out which of them is rewarded.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from transformers.utils import logging

from tests.demo import WORDS, hpc_rl, make_model

FOLDER = Path("demo/tools")
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
NUMBERS = tuple(str(number) for number in range(10, 41))
"""The words of every call and the numbers of two digits, as a token each: a number is copied in one step."""
SIZES = {"hidden": 64, "layers": 2, "num_attention_heads": 4, "vocab_size": 384, "initializer_range": 0.1}
"""With the usual range, this model learns to copy numbers in three times as many steps."""
DATA = (f"data.train_files={FOLDER}/data/train.jsonl", "trainer.device=cpu")
SFT = (
    *("submit", "sft", "--local", "--run-dir", f"{FOLDER}/sft", f"model.path={FOLDER}/model", *DATA),
    *("data.messages_key=demonstration", "data.max_length=32", "data.train_batch_size=128", "optim.lr=5e-3"),
    "trainer.total_training_steps=150",
)
PPO = (
    *("submit", "ppo", "--local", "--run-dir", f"{FOLDER}/ppo", "recipe=calculator", f"model.path={FOLDER}/sft/model"),
    *(*DATA, f"data.val_files={FOLDER}/data/val.jsonl"),
)


def main() -> int:
    began = time.monotonic()
    logging.disable_progress_bar()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    print(
        "1. A model with random weights, and sums. In 30 % of them the assistant calls a tool; it gives up the others."
    )
    make_model(FOLDER / "model", [*WORDS, *CALL, *NUMBERS], **SIZES)
    hpc_rl("data", "arithmetic", "--out", f"{FOLDER}/data", "--train", "8000", "--val", "80", "--calls", "0.3")
    print(f"\n2. hpc-rl {' '.join(SFT)}\n", flush=True)
    hpc_rl(*SFT)
    print(f"\n3. hpc-rl {' '.join(PPO)}\n", flush=True)
    hpc_rl(*PPO)
    found = [json.loads(line) for line in (FOLDER / "ppo" / "metrics.jsonl").read_text().splitlines()]
    scores = [record["val/score"] for record in found if "val/score" in record]
    calls = [record["val/environment/tool_calls"] for record in found if "val/score" in record]
    print(f"\nUnseen sums answered right (greedy): {scores[0]:.1%} after SFT, {scores[-1]:.1%} after GRPO.")
    print(f"Tool calls in each conversation:     {calls[0]:.2f} after SFT, {calls[-1]:.2f} after GRPO.")
    print(f"Report: {FOLDER}/ppo/report.html")
    print(f"It took {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
