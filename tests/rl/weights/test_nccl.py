"""The start of the NCCL transfer, without NCCL: both sides wait for each other, and neither for ever."""

from __future__ import annotations

import threading

import pytest

from hpc_rl.errors import RunError
from hpc_rl.rl.weights.vllm_nccl import joined_from_both_sides

TIMEOUT_S = 600


def test_both_sides_join_at_the_same_time() -> None:
    meeting = threading.Barrier(2)

    def join() -> str:
        meeting.wait(TIMEOUT_S)
        return "group"

    def other() -> None:
        meeting.wait(TIMEOUT_S)

    assert joined_from_both_sides(join, other, TIMEOUT_S) == "group"


def test_a_side_that_never_connects_has_a_deadline() -> None:
    never = threading.Event()
    with pytest.raises(RunError, match=r"NCCL has not connected .* within 0 s: set slurm\.interface"):
        joined_from_both_sides(never.wait, lambda: None, 0.1)
    never.set()


def test_the_error_of_either_side_comes_out() -> None:
    def fail() -> None:
        raise RunError("an engine died")

    never = threading.Event()
    with pytest.raises(RunError, match="an engine died"):
        joined_from_both_sides(never.wait, fail, TIMEOUT_S)
    never.set()
    with pytest.raises(RunError, match="an engine died"):
        joined_from_both_sides(fail, lambda: None, TIMEOUT_S)
