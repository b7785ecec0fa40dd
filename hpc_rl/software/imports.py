"""Imports of large libraries, which take most of the start of a training process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Import without garbage collection, which saves a fifth of the CPU time of torch and transformers together.

    Modules are not garbage, but each collection looks at all of their objects: later collections ignore them too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
