"""Generation as the loop sees it: the engines of all GPUs as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_rl.rl.calls import Pending
from hpc_rl.rl.rollout.base import Completion, Sampling
from hpc_rl.rl.workers.group import WorkerGroup


class Rollout(Protocol):
    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        """One completion for each prompt, in order; see RolloutEngine."""
        ...

    def wait_before_workers(self, timeout_s: float) -> None:
        """Call before workers load models, which some engines must do first."""
        ...

    def wait_until_ready(self, timeout_s: float) -> None: ...

    def sync(self) -> None:
        """Give the engines the policy's weights."""
        ...

    def sleep(self) -> None:
        """Make room on the GPUs for training, where both share them."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """End the engines, after a run that went well."""
        ...


class Colocated:
    """hf engines in the processes of the policy.

    Args:
        frees_memory: whether `sleep` gives the engines' memory back, which on CPUs costs more than it is worth.
    """

    def __init__(self, workers: WorkerGroup, frees_memory: bool) -> None:
        self._workers = workers
        self._frees_memory = frees_memory

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        return self._workers.generate(prompts, seeds, sampling)

    def wait_before_workers(self, timeout_s: float) -> None:
        """They come with the workers."""

    def wait_until_ready(self, timeout_s: float) -> None:
        """They start with their workers."""

    def sync(self) -> None:
        self._workers.sync_engine().wait()

    def sleep(self) -> None:
        if self._frees_memory:
            self._workers.sleep_engine().wait()

    def wake(self) -> None:
        """The engine takes memory when it generates."""

    def close(self) -> None:
        """They end with their workers."""
