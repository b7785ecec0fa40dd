"""An event loop in a thread of its own, for coroutines beside the loop of a run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 10.0


class LoopThread:
    """An event loop in a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._stop = asyncio.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name=name, daemon=True)
        self._thread.start()
        self._loop = started.result()

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._loop.is_closed()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop, unless it has ended. This does not wait for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], T]) -> T:
        """Call a function in the event loop, and return its result. This is for other threads."""

        async def called() -> T:
            return function()

        return self.start(called()).result()

    def close(self) -> None:
        """Cancel all coroutines, and end the thread."""
        self.call(self._stop.set)
        self._thread.join(_END_S)

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
