"""Traces of single steps by torch's profiler, one file per rank, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, supported_activities

from hpc_rl.run_dir import RunDir


class Trace:
    """A recording of what this process computes, on the CPU and on its accelerator, from now until `write`."""

    def __init__(self) -> None:
        self._profile = profile(activities=supported_activities(), acc_events=True)
        self._profile.start()

    def write(self, path: Path) -> None:
        """End the recording, and write it as a compressed Chrome trace.

        Args:
            path: ends with .json.gz; its folder is created.
        """
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))


def trace_path(run: RunDir, step: int, rank: int, pool: str | None = None) -> Path:
    """Return the path of a rank's trace of a step."""
    return run.profiles / f"step-{step:08d}" / f"{f'{pool}-' if pool else ''}rank{rank}.json.gz"


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Record what happens inside. None: record nothing."""
    if path is None:
        yield
        return
    trace = Trace()
    yield
    trace.write(path)
