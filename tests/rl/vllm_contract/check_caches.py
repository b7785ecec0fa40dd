"""Caches that a killed engine leaves: vLLM fails on what it writes in place, and recovers from everything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hpc_rl.rl.rollout.vllm.caches import IN_PLACE, remove_unreadable


def halve(file: Path) -> None:
    """Leave what a process leaves that is killed while it writes."""
    os.truncate(file, file.stat().st_size // 2)


def graphs(root: Path) -> Callable[[], object]:
    from vllm.compilation.backends import CompilerManager
    from vllm.config.utils import Range

    def manager() -> CompilerManager:
        made = object.__new__(CompilerManager)
        made.compiler, made.use_aot_compile, made.cache = mock.Mock(), True, {}
        made.initialize_cache(str(folder))
        return made

    folder = root / "torch_compile_cache" / "0123456789" / "rank_0_0" / "backbone"
    folder.mkdir(parents=True)
    writer = manager()
    writer.cache[Range(start=1, end=8192), 0, "inductor"] = {"graph_handle": ("a", "b"), "cache_key": "c"}
    writer.is_cache_updated = True
    writer.save_to_file()
    return lambda: manager().cache


def peers(root: Path) -> Callable[[], object]:
    from vllm.distributed.device_communicators import all_reduce_utils

    (root / "gpu_p2p_access_cache_for_2,3.json").write_text('{"0->1": true}')

    def read() -> object:
        all_reduce_utils._gpu_p2p_access_cache = None
        return all_reduce_utils.gpu_p2p_access_check(0, 1)

    return read


@pytest.mark.parametrize("kind", [graphs, peers])
def test_a_file_that_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Path], Callable[[], object]]
) -> None:
    """The pattern finds the file, vLLM fails on half of it, and it is removed; whole ones stay."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("vllm.platforms.interface._assigned_physical_gpu_ids", [2, 3])
    read = kind(tmp_path)
    assert read()
    (file,) = [file for pattern in IN_PLACE for file in tmp_path.glob(pattern)]
    remove_unreadable(tmp_path)
    assert file.exists() and read()
    halve(file)
    with pytest.raises((SyntaxError, ValueError)):
        read()
    remove_unreadable(tmp_path)
    assert not file.exists()


def test_half_of_a_compiled_model_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.compilation import decorators
    from vllm.config import DeviceConfig, VllmConfig

    load = mock.Mock(wraps=torch.compiler.load_compiled_function)
    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    model = SimpleNamespace(
        vllm_config=VllmConfig(device_config=DeviceConfig(device="cpu")), _is_encoder=False, forward=halve
    )
    for left in (b"", b"\x80\x05half of a pickle"):
        (tmp_path / "model").write_bytes(left)
        assert decorators._try_load_aot_compiled_fn(model, str(tmp_path / "model")) is None
    assert load.call_count == 2
