from __future__ import annotations

import pytest

from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.training.loop import validation_is_due


@pytest.mark.parametrize(
    ("step", "every", "expected"), [(6, 3, True), (7, 3, False), (5, 0, False), (1, 1, True), (9, 0, True)]
)
def test_validation_is_due_at_multiples_and_at_the_end(step: int, every: int, expected: bool) -> None:
    assert validation_is_due(TrainingConfig(test_freq=every), step, total_steps=9) is expected
