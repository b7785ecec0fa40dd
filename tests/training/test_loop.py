from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.training.loop import LoopState, run_steps, validation_is_due


@pytest.mark.parametrize(
    ("step", "every", "expected"), [(6, 3, True), (7, 3, False), (5, 0, False), (1, 1, True), (9, 0, True)]
)
def test_validation_is_due_at_multiples_and_at_the_end(step: int, every: int, expected: bool) -> None:
    assert validation_is_due(TrainingConfig(test_freq=every), step, total_steps=9) is expected


def test_a_run_that_stops_in_a_validation_saves_the_step() -> None:
    saved = list[int]()
    config = SimpleNamespace(trainer=TrainingConfig(test_freq=2))
    state = SimpleNamespace(step=0, total_steps=9, stop=False, save=False, val=[1], config=config)
    state.tracker, state.stopping, state.saver = Mock(), Mock(), Mock(**{"take_seconds.return_value": None})

    def step(_: object) -> dict[str, float]:
        state.step += 1
        return {"loss": 1.0}

    def validate() -> dict[str, float]:
        state.stop = True
        return {}

    run_steps(cast(LoopState, state), step, lambda: saved.append(state.step), validate)
    assert (state.step, saved) == (2, [2]) and [call.args[0] for call in state.tracker.log.call_args_list] == [1, 2, 2]
