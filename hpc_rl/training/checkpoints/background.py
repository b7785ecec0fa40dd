"""Writing to disk while training goes on.

writer = BackgroundWriter(world)
writer.start("checkpoint of step 10", write)    # returns at once; `write` runs in a thread
writer.wait()                                   # raises what went wrong
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta

import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.training.parallel.distributed import World

DEADLINE_S = 30 * 60
"""How long a write may take before the run gives up."""
AFTER_ERROR_S = 120
"""How long a run that failed waits for a write in progress. It may wait in vain for a rank that died."""
REMOVAL_S = 240
"""How long a run waits for what follows a write, such as the removal of old files."""


class BackgroundWriter:
    """Runs one piece of work at a time in a thread, on every rank of a world.

    The threads of all ranks have a process group of their own (gloo, in host memory), because collectives of the main
    threads go on at the same time.
    """

    def __init__(self, world: World) -> None:
        self._seconds: float | None = None
        self._world = world
        self._executor: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None
        self._follow_up: Future[None] | None = None
        self._what = ""

    @property
    def is_writing(self) -> bool:
        """Whether work has been started that has not ended."""
        return self._work is not None and not self._work.done()

    def start(self, what: str, work: Callable[[World], None], follow_up: Callable[[], None] = lambda: None) -> None:
        """Start work after the work before it has ended. Every rank calls this.

        Args:
            what: name of the work for errors.
            work: gets a World for the thread's collectives. If it raises UserError on some rank, all ranks fail.
            follow_up: runs in the thread if the work succeeds. The work has then ended already.

        Raises:
            RunError: the work before it failed.
        """
        self.wait()
        if self._executor is None:
            # Nothing in the thread refers to this object, so that the thread ends when the object is gone.
            self._executor = ThreadPoolExecutor(1, "background-writer", _use_device, (self._world,))
            if self._world.size > 1:
                timeout = timedelta(seconds=DEADLINE_S)
                group = self._world.new_group(range(self._world.size), backend="gloo", timeout=timeout)
                self._world = dataclasses.replace(self._world, group=group)
        self._what = what
        self._work = future = self._executor.submit(self._run, work)
        self._follow_up = self._executor.submit(_follow, future, follow_up)

    def wait(self, timeout_s: float = DEADLINE_S, advice: str = "check the file system") -> None:
        """Wait until the work has ended, and then for what follows it, but not longer than REMOVAL_S.

        Args:
            advice: the end of the error if there is not enough time.

        Raises:
            RunError: the work failed, with its cause, or did not end in time. Each failure is raised once.
        """
        (work, follow_up), self._work, self._follow_up = (self._work, self._follow_up), None, None
        if work is None or follow_up is None:
            return
        deadline = time.monotonic() + timeout_s
        if not wait_for([work], timeout_s).done:
            raise RunError(f"{self._what} was not written within {timeout_s:.0f} s: {advice}")
        work.result()
        if wait_for([follow_up], min(REMOVAL_S, max(0.0, deadline - time.monotonic()))).done:
            follow_up.result()

    def take_seconds(self) -> float | None:
        """Return the duration of work that has ended successfully since the last call; None if there is none."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def _run(self, work: Callable[[World], None]) -> None:
        began = time.monotonic()
        try:
            self._world.together(lambda: work(self._world))
        except UserError as error:
            # `wait` raises it, but perhaps only at the next checkpoint.
            if self._world.is_main:
                print(f"warning: {self._what}: {error}", file=sys.stderr, flush=True)
            raise
        self._seconds = time.monotonic() - began


def _follow(work: Future[None], follow_up: Callable[[], None]) -> None:
    if work.exception() is None:
        follow_up()


def _use_device(world: World) -> None:
    """Choose the rank's device for a thread. torch's current device belongs to a thread, and a new one has 0."""
    if world.on_accelerator:
        torch.accelerator.set_device_index(world.device)
