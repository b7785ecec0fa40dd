"""Host memory while a model is loaded.

It is measured as the sum over ranks of each process's largest resident set (VmHWM: anonymous memory, mapped files and
shared memory). The kernel records it, so no peak is missed; pages that processes share, such as torch's libraries,
count once for each process. The sum is therefore at least the combined peak. (ru_maxrss would not do: a new process
begins with the value of the one that started it.)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.finetune.jobs import spawn
from tests.helpers import make_tiny_model

GB = 10**9
OVERHEAD = 1.25 * GB
"""Two Python processes with torch and transformers take 0.7 GB, and two buffers 0.13 GB."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """About 255 million weights in float32."""
    return make_tiny_model(tmp_path, vocab=32_000, hidden=1024, layers=12)


@pytest.mark.slow
def test_two_ranks_need_no_second_copy(model: Path) -> None:
    file = model / "model.safetensors"
    size = file.stat().st_size
    assert size > GB
    try:
        results = spawn(["-m", "tests.training.models.loading_memory", str(model)], ranks=2, timeout=600)
    finally:
        file.unlink()
    found = []
    for code, out, errors in results:
        assert code == 0, errors
        found.append(json.loads(out.rpartition("found ")[2]))
    assert all(rank["same"] for rank in found)
    peak = sum(rank["peak"] for rank in found)
    assert peak < size + OVERHEAD, f"{peak / GB:.2f} GB for {size / GB:.2f} GB of files"
    print(f"files {size / GB:.2f} GB, peak of two ranks {peak / GB:.2f} GB")
