"""The benchmark of the driver, with steps of a few tokens."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import driver
from benchmarks.driver import Shared, draw_lengths, measure, rows_of


def test_lengths_differ_around_their_mean() -> None:
    lengths = draw_lengths(16, 8)
    assert sorted(lengths.tolist()) == [6] * 4 + [8] * 8 + [10] * 4 and lengths.tolist() != sorted(lengths.tolist())


def test_shared_memory_has_copies_and_counts_them() -> None:
    shared, values = Shared(10_000), np.arange(100, dtype=np.int32)
    copy = shared.array(values)
    values[:] = 0
    assert copy.tolist() == list(range(100)) and not copy.flags.writeable and shared.most == 400
    shared.keep()
    for _ in range(2):
        shared.put((np.zeros(500, np.int64), "more"))
        assert 448 + 4000 < shared.most < 448 + 4000 + 400
        shared.clear()


@pytest.mark.parametrize("algorithm, phases", [("GRPO", {"update_actor"}), ("PPO", {"update_actor", "update_critic"})])
def test_a_step_is_that_of_the_training_loop(algorithm: str, phases: set[str]) -> None:
    found = measure(algorithm, ranks=3, steps=2, responses=32, tokens=16, prompts=40)
    for seconds in found["phases"]:
        assert {"timing_s/step", "timing_s/adv", "timing_s/ref", *(f"timing_s/{name}" for name in phases)} <= {*seconds}
    assert len(found["draw_s"]) == len(found["rest_s"]) == 2 and min(found["rest_s"]) > 0
    tokens = 4 * 32 * 16
    # Responses and their log-probabilities, the numbers that ranks return, what ranks hold, and columns for the update.
    assert found["shared_bytes"] > (3 + 1 + 5) * tokens and found["own_bytes"] > 0


def test_the_table_has_medians() -> None:
    found = {"draw_s": [1.0, 3.0, 2.0], "rest_s": [0.5, 0.25, 0.75], "own_bytes": 25 * 10**8, "shared_bytes": 10**9}
    assert rows_of({"GRPO, 8 ranks": found}) == [["GRPO, 8 ranks", "2.00", "0.50", "2.50", "1.00"]]


def test_a_step_has_the_tokens_of_the_goal() -> None:
    assert (driver.PROMPTS, driver.RESPONSES, driver.TOKENS) == (100_000, 4096, 8192)
    config = driver.configuration("GRPO", driver.RESPONSES, driver.TOKENS)
    assert config.data.train_batch_size * config.rollout.n == 4096
    assert draw_lengths(4096, 8192).max() == config.data.max_response_length
