"""The checks that adapters reach the engine."""

from __future__ import annotations

import pytest
import torch

from hpc_rl.errors import RunError
from hpc_rl.rl.adapter_check import AdapterCheck

BASE = torch.full((4000,), -1.0)


def noise(size: float, tokens: int = 4000, seed: int = 0) -> torch.Tensor:
    return size * torch.randn(tokens, generator=torch.Generator().manual_seed(seed))


def test_both_checks_succeed() -> None:
    check = AdapterCheck(adapters_are_new=True)
    line = check.compare(BASE, BASE, BASE + noise(0.01))
    assert line is not None and "equal those of the model without adapters" in line and "4,000 tokens" in line
    assert check.next == "movement" and check.unfinished() is not None
    assert check.compare(BASE, BASE, BASE + noise(0.01)) is None  # no update yet
    moved = noise(0.1, seed=1)
    line = check.compare(BASE + moved, BASE, BASE + moved + noise(0.01))
    assert line is not None and "slope 1.0" in line
    assert check.next is None and check.unfinished() is None


@pytest.mark.parametrize("whose", ["policy", "engine"])
@pytest.mark.parametrize("by", [0.03, float("nan")])
def test_new_adapters_change_nothing(whose: str, by: float) -> None:
    off = BASE + by  # 0.011 in probability, and less than 0.1 in its logarithm
    found = (off, BASE, BASE) if whose == "policy" else (BASE, BASE, off)
    with pytest.raises(RunError, match=f"new adapters change nothing, but the {whose}'s probabilities differ"):
        AdapterCheck(adapters_are_new=True).compare(*found)


def test_small_probabilities_are_compared_by_their_logarithms() -> None:
    base = torch.full((100,), -9.0)
    AdapterCheck(adapters_are_new=True).compare(base, base, base + 0.09)
    with pytest.raises(RunError, match=r"their logarithms by 0\.110"):
        AdapterCheck(adapters_are_new=True).compare(base, base, base + 0.11)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, -1.0])
def test_an_engine_that_moves_otherwise(factor: float) -> None:
    moved = noise(0.1, seed=1)
    with pytest.raises(RunError, match=f"moved by -?{abs(factor):.2f} times the policy's change"):
        AdapterCheck(adapters_are_new=False).compare(BASE + moved, BASE, BASE + factor * moved + noise(0.002))


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_small_movement_is_decided_when_enough_tokens_have_been_seen(factor: float) -> None:
    """With noise of ten times the movement, a standard error of 0.05 needs (10 / 0.05) ** 2 = 40,000 tokens."""
    check, said, tokens = AdapterCheck(adapters_are_new=False), "", 0
    while not said:
        tokens += 4000
        moved = noise(0.002, seed=tokens)
        try:
            engine = BASE + factor * moved + noise(0.02, seed=tokens + 1)
            said = check.compare(BASE + moved, BASE, engine) or ""
        except RunError as error:
            said = str(error)
    assert ("moved together" if factor else "do not reach the engine") in said
    assert 36_000 <= tokens <= 44_000


def test_an_engine_that_returns_no_numbers() -> None:
    moved = noise(0.1, seed=1)
    with pytest.raises(RunError, match="moved by nan times"):
        AdapterCheck(adapters_are_new=False).compare(BASE + moved, BASE, BASE * float("nan"))
