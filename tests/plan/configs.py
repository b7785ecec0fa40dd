"""Configurations of jobs for the tests of plans, and the shape of their model."""

from __future__ import annotations

from typing import Any

from hpc_rl.config.compose import compose
from hpc_rl.plan.shape import Shape, shape_of
from tests.simulated_gpu.shapes import sizes

QWEN_7B = sizes("7B")
SHAPES: dict[str, Shape] = {"/7b": shape_of(QWEN_7B, "/7b")}
SHAPES["/other"] = shape_of({**QWEN_7B, "num_hidden_layers": 14}, "/other")
PPO = ("data.train_files=x.jsonl", "reward.function=exact", "data.train_batch_size=1024")
SFT = ("data.train_files=x.jsonl", "data.train_batch_size=1024", "data.max_length=1024")


def config(kind: str, *words: str) -> Any:
    """Return the configuration of a job of a 7B model on GPUs, with micro-batches of 4,096 tokens if no word sets
    them."""
    if not any(word.startswith("trainer.micro_tokens=") for word in words):
        words = ("trainer.micro_tokens=4096", *words)
    own = {"ppo": PPO, "generate": ("data.files=x.jsonl",)}.get(kind, SFT)
    return compose(kind, ["model.path=/7b", "trainer.device=cuda", "trainer.n_gpus_per_node=8", *own, *words])
