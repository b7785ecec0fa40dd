"""make demo-pipeline: two pipelines on sums, from nothing to a table of accuracies.

A careless teacher's sums train a first model, which is then improved twice: by a reward model and PPO, and by iterative
DPO. Both learn from the model's own answers, of which a reward function tells right from wrong.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from transformers.utils import logging

from tests.demo import hpc_rl, make_model

FOLDER = Path("demo/pipeline")
TEST = "demo/pipeline/data/val.jsonl"
LENGTHS = ("data.max_prompt_length=24", "data.max_response_length=6")
SFT = (
    *("submit", "sft", "--local", "--run-dir", "demo/pipeline/sft", "model.path=demo/pipeline/model"),
    *("data.train_files=demo/pipeline/data/train.jsonl", "trainer.device=cpu", "data.max_length=32"),
    *("data.train_batch_size=256", "optim.lr=1e-3", "trainer.total_training_steps=300"),
)
REWARD_MODEL = """\
description: A reward model from the model's own answers, then PPO with it.
values: {model: null, prompts: null, test: null}
before:
  eval: &eval
    kind: eval
    options: {model.path: "@model", data.files: "@test", reward.function: exact}
stages:
  generate:
    kind: generate
    options: {model.path: "@model", data.files: "@prompts", reward.function: exact, rollout.n: 8}
  select:
    kind: select
    options: {select.responses: "@generate", select.method: pairs}
  reward:
    kind: rm
    options: {model.path: "@model", data.train_files: "@select"}
  train:
    kind: ppo
    options: {model.path: "@model", data.train_files: "@prompts", data.val_files: "@test", reward.model: "@reward"}
    becomes: model
  eval: *eval
"""
VALUES = ("model=demo/pipeline/sft/model", "prompts=demo/pipeline/prompts.jsonl", f"test={TEST}")
SHORT = tuple(f"{stage}.{word}" for stage in ("generate", "eval") for word in LENGTHS)
PPO = (
    *("chain", "demo/pipeline/reward-model.yaml", "--local", "--job-name", "demo-reward-model", *VALUES, *SHORT),
    *("reward.data.max_length=32", "reward.data.train_batch_size=32", "reward.optim.lr=3e-4"),
    *("reward.trainer.total_epochs=15", *(f"train.{word}" for word in LENGTHS), "train.data.train_batch_size=128"),
    *("train.rollout.n=4", "train.algorithm.advantage=grpo", "train.actor.optim.lr=2e-4"),
    *("train.trainer.total_training_steps=30", "train.trainer.val_before_train=false"),
)
DPO = (
    *(
        "chain",
        "iterative-dpo",
        "--rounds",
        "3",
        "--local",
        "--job-name",
        "demo-iterative-dpo",
        *VALUES,
        "reward=exact",
    ),
    *(*SHORT, "train.data.max_length=32", "train.data.train_batch_size=32", "train.optim.lr=3e-4"),
    *("train.optim.warmup_ratio=0.1", "train.trainer.total_epochs=15", "train.algorithm.sft_coeff=1"),
)


def main() -> int:
    began = time.monotonic()
    logging.disable_progress_bar()
    for folder in (FOLDER, Path("runs/demo-reward-model"), Path("runs/demo-iterative-dpo")):
        shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    print("1. A model with random weights, and sums by a teacher that forgets to carry in 70 % of its answers.")
    make_model(FOLDER / "model")
    hpc_rl("data", "arithmetic", "--out", "demo/pipeline/data", "--train", "8000", "--val", "80", "--careless", "0.7")
    prompts = (FOLDER / "data/train.jsonl").read_text().splitlines(keepends=True)
    (FOLDER / "prompts.jsonl").write_text("".join(dict.fromkeys(prompts[:600])))
    (FOLDER / "reward-model.yaml").write_text(REWARD_MODEL)
    for number, words in enumerate((SFT, PPO, DPO), 2):
        print(f"\n{number}. hpc-rl {' '.join(words)}\n", flush=True)
        hpc_rl(*words)
    print("\nUnseen sums answered right, mean of 8 answers to each:")
    for name, stages in {"demo-reward-model": 2, "demo-iterative-dpo": 4}.items():
        scores = [score(name, number) for number in range(stages)]
        print(f"  {name:<20} " + " -> ".join(f"{value:.1%}" for value in scores))
        hpc_rl("report", name)
    print(f"It took {time.monotonic() - began:.0f} s.")
    return 0


def score(name: str, number: int) -> float:
    """Return the accuracy after a round."""
    found = json.loads((Path("runs") / name / f"{name}_{number}-eval" / "eval.json").read_text())
    value: float = found["data"][0]["metrics"]["score"]["value"]
    return value


if __name__ == "__main__":
    sys.exit(main())
