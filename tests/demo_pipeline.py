"""make demo-pipeline: three pipelines on sums, from nothing to a table of accuracies.

Careless solutions train a first model, which is improved in three ways: by rejection sampling, by iterative DPO, and by
PPO with a reward model. All learn from the model's own answers, which a reward function scores as right or wrong; PPO
sees the scores of the reward model only.
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
VALUES = (
    *("model=demo/pipeline/sft/model", "prompts=demo/pipeline/prompts.jsonl", f"test={TEST}", "reward=exact"),
    *(f"{stage}.{word}" for stage in ("generate", "eval") for word in LENGTHS),
)
FINE_TUNING = (
    *("train.data.max_length=32", "train.data.train_batch_size=32", "train.optim.lr=3e-4"),
    *("train.optim.warmup_ratio=0.1", "train.trainer.total_epochs=15"),
)
PIPELINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "rejection-sampling": (3, ("select.select.method=threshold", "select.select.threshold=1", *FINE_TUNING)),
    "iterative-dpo": (3, ("train.algorithm.sft_coeff=1", *FINE_TUNING)),
    "reward-model": (
        1,
        (
            *("generate.rollout.n=32", "generate.rollout.temperature=1.3", "rm.data.max_length=32"),
            *("rm.data.train_batch_size=64", "rm.optim.lr=5e-4", "rm.trainer.total_training_steps=1200"),
            *(f"train.{word}" for word in LENGTHS),
            *("train.reward.clip=[0,3]", "train.data.train_batch_size=128", "train.rollout.n=4"),
            *("train.actor.mini_batch_size=256", "train.actor.optim.lr=3e-4", "train.actor.optim.lr_scheduler=linear"),
            *("train.critic.optim.lr=1e-3", "train.trainer.total_training_steps=150"),
        ),
    ),
}
"""Pipeline -> number of rounds and its own options."""


def main() -> int:
    began = time.monotonic()
    logging.disable_progress_bar()
    for folder in (FOLDER, *(Path("runs") / f"demo-{name}" for name in PIPELINES)):
        shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    print("1. A model with random weights, and sums with solutions that forget to carry in 70 % of the rows.")
    make_model(FOLDER / "model")
    hpc_rl("data", "arithmetic", "--out", "demo/pipeline/data", "--train", "8000", "--val", "80", "--careless", "0.7")
    prompts = (FOLDER / "data/train.jsonl").read_text().splitlines(keepends=True)
    (FOLDER / "prompts.jsonl").write_text("".join(dict.fromkeys(prompts[:600])))
    jobs = [SFT]
    for name, (rounds, own) in PIPELINES.items():
        jobs.append(("chain", name, "--rounds", str(rounds), "--local", "--job-name", f"demo-{name}", *VALUES, *own))
    for number, job in enumerate(jobs, 2):
        print(f"\n{number}. hpc-rl {' '.join(job)}\n", flush=True)
        hpc_rl(*job)
    print("\nUnseen sums answered right, mean of 8 answers to each, before the first round and after each:")
    for name, (rounds, _) in PIPELINES.items():
        print(f"  {name:<20} " + " -> ".join(f"{score(f'demo-{name}', number):.1%}" for number in range(rounds + 1)))
        hpc_rl("report", f"demo-{name}")
    print(f"It took {time.monotonic() - began:.0f} s.")
    return 0


def score(name: str, number: int) -> float:
    """Return the accuracy after a round."""
    found = json.loads((Path("runs") / name / f"{name}_{number}-eval" / "eval.json").read_text())
    value: float = found["data"][0]["metrics"]["score"]["value"]
    return value


if __name__ == "__main__":
    sys.exit(main())
