"""The snapshot of a full GPU, with a stand-in for torch's functions that has their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.errors import RunError
from hpc_rl.training import guards, memory_snapshot

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    found: list[tuple[str, dict[str, Any]]] = []

    def stand_in(name: str) -> Callable[..., None]:
        signature = inspect.signature(getattr(torch.cuda.memory, name))

        def call(*arguments: Any, **named: Any) -> None:
            found.append((name, signature.bind(*arguments, **named).arguments))
            if name == "_dump_snapshot":
                Path(found[-1][1]["filename"]).write_bytes(b"snapshot")

        return call

    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(torch.cuda.memory, name, stand_in(name))
    yield found
    memory_snapshot.record(CPU, None)


def run_out(error: Exception) -> str:
    with pytest.raises(RunError) as caught, guards.explain_out_of_memory("step 3"):
        raise error
    return str(caught.value)


def test_a_full_gpu_leaves_a_snapshot_that_the_error_names(calls: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "memory-rank0.pickle"
    memory_snapshot.record(CUDA, path)
    assert calls == [("_record_memory_history", {"context": "alloc", "stacks": "python", "max_entries": 20_000})]
    message = run_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert "out of memory in step 3: lower trainer.micro_tokens" in message
    assert f"what fills the memory: {path}, shown by https://docs.pytorch.org/memory_viz" in message
    assert path.read_bytes() == b"snapshot"


def test_a_full_host_leaves_none(calls: list[Any], tmp_path: Path) -> None:
    memory_snapshot.record(CUDA, tmp_path / "memory-rank0.pickle")
    assert "what fills" not in run_out(MemoryError())
    assert list(tmp_path.iterdir()) == []


def test_a_cpu_records_nothing(calls: list[Any], tmp_path: Path) -> None:
    memory_snapshot.record(CPU, tmp_path / "memory-rank0.pickle")
    memory_snapshot.record(CUDA, None)
    assert calls == []
    assert "what fills" not in run_out(torch.OutOfMemoryError("full"))


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_error(calls: list[Any], tmp_path: Path) -> None:
    memory_snapshot.record(CUDA, tmp_path / "no" / "folder.pickle")
    assert run_out(torch.OutOfMemoryError("full")).endswith("(full)")
