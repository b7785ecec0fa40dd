"""Runs on CPUs that pretend to have the memory of GPUs; test_rows.py starts this for several ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpc_rl.finetune.train import parse
from hpc_rl.finetune.trainer import train
from hpc_rl.training import rows
from hpc_rl.training.parallel import distributed


@contextmanager
def memory(device: float, peak: float) -> Iterator[None]:
    """Let trainer.micro_tokens be decided for a device of so many bytes, of which a run uses at most `peak`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "memory_bytes", lambda _: device)
        patch.setattr(rows, "max_memory_gb", lambda _: peak / 1e9)
        yield


if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    with memory(*json.loads(sys.argv[2])[world.rank]):
        code = train(*parse(json.loads(sys.argv[1])), world)
    print("exit code", code)
    distributed.finish()
