"""The checks that adapters reach the engine."""

from __future__ import annotations

import pytest
import torch

from hpc_rl.errors import RunError
from hpc_rl.rl.weights.adapter_check import AdapterCheck

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
@pytest.mark.parametrize("by", [-0.06, float("nan")])
def test_new_adapters_change_nothing(whose: str, by: float) -> None:
    base = torch.full((100,), -0.05)
    off = base + by  # 0.055 in probability, and less than 0.1 in its logarithm
    found = (off, base, base) if whose == "policy" else (base, base, off)
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


def decided(factor: float, movement: float, policy: float, base: float, engine: float) -> tuple[str, int]:
    """What the check says in the end, and after how many steps of 4000 tokens. The numbers are standard deviations."""
    check = AdapterCheck(adapters_are_new=False)
    for step in range(1, 41):
        moved, *rounding = (noise(size, seed=10 * step + i) for i, size in enumerate((movement, policy, base, engine)))
        columns = (BASE + moved + rounding[0], BASE + rounding[1], BASE + factor * moved + rounding[2])
        try:
            said = check.compare(*columns)
        except RunError as error:
            return str(error), step
        if said is not None:
            return said, step
    return "", 40


@pytest.mark.parametrize(("factor", "said"), [(0.0, "stayed with those of the model without"), (1.0, "are nearer to")])
def test_a_movement_that_is_small_beside_the_engines_rounding(factor: float, said: str) -> None:
    """With noise of ten times the movement, six standard errors need (6 * 2 * 10) ** 2 = 14,400 tokens. Those of ten
    steps count at most, so forty times the movement is too much."""
    message, steps = decided(factor, 0.002, 0, 0, 0.02)
    assert said in message and 3 <= steps <= 6
    assert decided(factor, 0.002, 0, 0, 0.08) == ("", 40)


@pytest.mark.parametrize(("factor", "said"), [(0.0, "stayed with those of the model without"), (1.0, "are nearer to")])
def test_a_movement_that_is_small_beside_everybodys_rounding(factor: float, said: str) -> None:
    """Rounding of the base is in both movements, which pulls the slope to 0.5 and must not decide."""
    message, steps = decided(factor, 0.04, 0.02, 0.02, 0.02)
    assert said in message and steps <= 2
    assert decided(factor, 0.002, 0.02, 0.02, 0.02) == ("", 40)
    assert decided(factor, 0.0, 0.02, 0.03, 0.02) == ("", 40), "the base rounds more than the policy"
    assert decided(factor, 0.0, 0.03, 0.02, 0.02) == ("", 40), "the base rounds less than the policy"


def test_later_steps_count_more() -> None:
    """Movements grow above the rounding: the check decides although many steps were undecided."""
    check = AdapterCheck(adapters_are_new=False)
    for step in range(50):
        rounding = (noise(0.02, seed=3 * step + i) for i in range(3))
        assert check.compare(*(BASE + each for each in rounding)) is None
    said, steps = None, 0
    while said is None:
        moved, *rounding = (
            noise(0.04, 4000, 1000 + 4 * steps),
            *(noise(0.02, 4000, 1001 + 4 * steps + i) for i in range(3)),
        )
        said = check.compare(BASE + moved + rounding[0], BASE + rounding[1], BASE + moved + rounding[2])
        steps += 1
    assert "are nearer to the policy's than to the base's" in said and 2 <= steps <= 8


def test_an_engine_that_returns_no_numbers() -> None:
    moved = noise(0.1, seed=1)
    with pytest.raises(RunError, match="moved by nan times"):
        AdapterCheck(adapters_are_new=False).compare(BASE + moved, BASE, BASE * float("nan"))
