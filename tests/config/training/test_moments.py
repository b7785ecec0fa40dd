"""Which weights have moments in 8 bits, and what this saves."""

from __future__ import annotations

import pytest

from hpc_rl.config.training.moments import block_of, saved_by_eight_bits
from tests.plan.configs import config


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((152064, 3584), 256),
        ((3584, 896), 224),  # 896 = 4 x 224
        ((64, 64), 64),
        ((63, 65), None),  # 4,095 values
        ((4096,), None),
        ((1000, 16), 16),
        ((1000, 8), None),
        ((8, 4096), 256),
        ((500, 257), None),  # a prime number
        ((8, 100, 514), None),
        ((8, 100, 512), 256),
        ((100, 255), 255),
    ],
)
def test_blocks_are_parts_of_a_row(shape: tuple[int, ...], block: int | None) -> None:
    assert block_of(shape) == block
    assert block is None or shape[-1] % block == 0


def test_savings() -> None:
    assert saved_by_eight_bits((4096, 4096), 4) == 3 - 1 / 64
    assert saved_by_eight_bits((4096, 64), 2) == 1 - 1 / 16
    assert saved_by_eight_bits((4096,), 4) == 0


def test_optimizers_of_a_job() -> None:
    assert list(config("sft").optimizers) == ["optim"]
    job = config("ppo", "critic.optim.moments=8bit")
    assert {name: one.moments for name, one in job.optimizers.items()} == {
        "actor.optim": "float32",
        "critic.optim": "8bit",
    }
    assert list(config("ppo", "algorithm.advantage=grpo", "rollout.n=2").optimizers) == ["actor.optim"]
