"""Additions as chat rows: a data set without a download that a model below 1M parameters learns within minutes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.system.files import write_jsonl

_LARGEST = 20
# All questions; the training and the validation data are disjoint parts of them.
_QUESTIONS = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST + 1)]


def generate(
    out: Path, n_train: int, n_val: int, seed: int = 0, careless: float = 0.0, calls: float | None = None
) -> dict[str, int]:
    """Write train.jsonl and val.jsonl with columns `messages` (user, assistant) and `answer`.

    The questions are the 441 sums of two numbers from 0 to 20. train.jsonl has no question of val.jsonl, and repeats
    its questions if n_train is larger than the number that remains. The same seed and n_val give the same val.jsonl.

    Args:
        careless: fraction of the training rows whose message forgets to carry and is wrong, while `answer` is right. A
            model that learns from the messages makes the same mistake, which reinforcement learning can correct.
        calls: adds the column `demonstration` to the training rows. In this fraction of its chats, the assistant lets
            the tool `add` of hpc_rl.environments.calculator compute the answer; in the others, it writes `?`. A model
            that learns from them can use the tool, and often gives up.

    Returns:
        the number of rows written, by split.

    Raises:
        UserError: a size is below 1, n_val leaves no question to train on, or the folder cannot be written.
    """
    if n_train < 1 or not 1 <= n_val < len(_QUESTIONS):
        raise UserError(
            f"{n_train} training questions and {n_val} for validation: at least 1 of each is needed, and at most "
            f"{len(_QUESTIONS) - 1} for validation, since there are {len(_QUESTIONS)}"
        )
    rng = random.Random(seed)
    questions = rng.sample(_QUESTIONS, len(_QUESTIONS))
    val, rest = questions[:n_val], questions[n_val:]
    train = rest[:n_train] + rng.choices(rest, k=max(0, n_train - len(rest)))
    rows = [_row(a, b, rng.random() < careless) for a, b in train]
    if calls is not None:
        rows = [
            row | {"demonstration": _call(a, b) if rng.random() < calls else _no_answer(a, b)}
            for row, (a, b) in zip(rows, train, strict=True)
        ]
    return {
        "train": write_jsonl(out / "train.jsonl", rows),
        "val": write_jsonl(out / "val.jsonl", (_row(a, b, forgets_carry=False) for a, b in val)),
    }


def _row(a: int, b: int, forgets_carry: bool) -> dict[str, Any]:
    response = _without_carry(a, b) if forgets_carry else a + b
    return {
        "messages": [_question(a, b), {"role": "assistant", "content": str(response)}],
        "answer": str(a + b),
    }


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def _call(a: int, b: int) -> list[dict[str, str]]:
    return [
        _question(a, b),
        {
            "role": "assistant",
            "content": f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>',
        },
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def _no_answer(a: int, b: int) -> list[dict[str, str]]:
    return [_question(a, b), {"role": "assistant", "content": "?"}]


def _without_carry(a: int, b: int) -> int:
    """Add without carrying the one: 17 + 5 = 12."""
    return 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10
