"""Heartbeats of a program's training, by which its node entry finds a hang (hpc_rl/node/hangs).

They begin after its first step: nobody knows how long a program reads its data, compiles and resumes before that, or
what it does after its last step.
"""

from __future__ import annotations

from contextlib import ExitStack

from hpc_rl.liveness.heartbeat import PROGRAM, heart

_step = ExitStack()
"""The phase of this process's step."""


def begin(rank: int) -> None:
    """Note that this rank begins a training."""
    heart.begin(f"rank {rank}", phase=PROGRAM)


def begin_step(number: int) -> None:
    """Note that a step begins, after another one of this process."""
    end()
    _step.enter_context(heart.phase("training"))
    heart.at_step(number)


def end() -> None:
    """Note that the training has ended."""
    _step.close()
