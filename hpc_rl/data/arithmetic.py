"""Additions as chat rows: a data set without a download that a model below 1M parameters learns within minutes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.host.files import write_jsonl

_LARGEST = 20
# All questions; the training and the validation data are disjoint parts of them.
_QUESTIONS = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST + 1)]


def generate(out: Path, n_train: int, n_val: int, seed: int = 0, careless: float = 0.0) -> dict[str, int]:
    """Write train.jsonl and val.jsonl with columns `messages` (user, assistant) and `answer`.

    The questions are the 441 sums of two numbers from 0 to 20. train.jsonl has no question of val.jsonl, and repeats
    its questions if n_train is larger than the number that remains. The same seed and n_val give the same val.jsonl.

    Args:
        careless: fraction of the training rows whose message forgets to carry and is wrong, while `answer` is right. A
            model that learns from the messages makes the same mistake, which reinforcement learning can correct.

    Returns:
        the number of rows written, by split.

    Raises:
        UserError: a size is below 1, n_val leaves no question to train on, or the folder cannot be written.
    """
    if n_train < 1 or not 1 <= n_val < len(_QUESTIONS):
        raise UserError(f"need n_train >= 1 and 1 <= n_val < {len(_QUESTIONS)}, got {n_train} and {n_val}")
    rng = random.Random(seed)
    questions = rng.sample(_QUESTIONS, len(_QUESTIONS))
    val, rest = questions[:n_val], questions[n_val:]
    train = rest[:n_train] + rng.choices(rest, k=max(0, n_train - len(rest)))
    return {
        "train": write_jsonl(out / "train.jsonl", (_row(a, b, rng.random() < careless) for a, b in train)),
        "val": write_jsonl(out / "val.jsonl", (_row(a, b, forgets_carry=False) for a, b in val)),
    }


def _row(a: int, b: int, forgets_carry: bool) -> dict[str, Any]:
    response = _without_carry(a, b) if forgets_carry else a + b
    return {
        "messages": [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": str(response)},
        ],
        "answer": str(a + b),
    }


def _without_carry(a: int, b: int) -> int:
    """Add without carrying the one: 17 + 5 = 12."""
    return 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10
