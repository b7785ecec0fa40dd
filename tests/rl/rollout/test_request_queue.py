"""How long engines generate between two calls. tests/rl/runs/test_request_queue.py has the queue itself."""

import pytest

from hpc_rl.rl.rollout.request_queue import slice_of


@pytest.mark.parametrize(("engines", "slice_s"), [(1, 0.1), (20, 0.1), (40, 0.2), (512, 2.56)])
def test_many_engines_generate_longer_so_that_the_driver_keeps_up(engines: int, slice_s: float) -> None:
    assert slice_of(engines) == pytest.approx(slice_s)
