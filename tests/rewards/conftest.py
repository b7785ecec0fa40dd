from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rewards.scorer import Scorer, open_scorer

Open = Callable[..., Scorer]
Write = Callable[..., str]


def prompts(*answers: Any) -> list[Prompt]:
    """One prompt for each reference answer."""
    return [
        Prompt(np.zeros(1, np.int32), answer, {"id": number}, f"question {number}")
        for number, answer in enumerate(answers)
    ]


@pytest.fixture
def opened() -> Iterator[Open]:
    """open_scorer with the options of reward.*; what it opens is closed after the test."""
    scorers = []

    def opener(**options: Any) -> Scorer:
        scorers.append(open_scorer(OptionalRewardConfig(**{"workers": 2, "on_error": -1.0, **options})))
        return scorers[-1]

    yield opener
    for scorer in scorers:
        scorer.close()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a reward file; returns its reward.function."""

    def writer(source: str, name: str = "own.py", function: str = "score") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
        return f"{tmp_path / name}:{function}"

    return writer
