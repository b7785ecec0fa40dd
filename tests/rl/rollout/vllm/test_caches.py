"""Folders of compile caches, and files that a killed engine left in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.rl.rollout.vllm.caches import folder_of, remove_unreadable, set_up_caches
from tests.rl.rollout.vllm.test_engine import needs_vllm

COMPILED = "torch_compile_cache/0123456789/rank_1_0/backbone/vllm_compile_cache.py"
PEERS = "gpu_p2p_access_cache_for_2,3.json"
WHOLE = {
    COMPILED: "{   ((1, 8192), 0, 'inductor'): {'cache_key': 'a', 'graph_handle': ('b', 'c')}}",
    PEERS: '{"0->1": true}',
}
AOT = "torch_compile_cache/torch_aot_compile/abc/rank_1_0/model"


def test_each_set_of_devices_has_a_folder() -> None:
    """Also if they belong to other ranks: a graph of rank 0 names the first one."""
    root = Path("/cache/vllm")
    assert folder_of(root, [2, 3]) == root / "devices-2-3"
    sets = ([0, 1], [1, 0], [2, 3], [0, 1, 2, 3], [0, 123], [1, 23], [12, 3])
    assert len({folder_of(root, each) for each in sets}) == len(sets)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("left", ["", "half", "no text"])
def test_a_file_that_a_killed_engine_left_is_removed(tmp_path: Path, name: str, left: str) -> None:
    for each, text in {**WHOLE, AOT: "half of an artefact"}.items():
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text(text)
    content = {"": b"", "half": WHOLE[name][: len(WHOLE[name]) // 2].encode(), "no text": b"\xff\x00"}[left]
    (tmp_path / name).write_bytes(content)
    remove_unreadable(tmp_path)
    assert not (tmp_path / name).exists()
    (other,) = WHOLE.keys() - {name}
    assert (tmp_path / other).read_text() == WHOLE[other] and (tmp_path / AOT).exists()  # vLLM itself checks this one


def test_whole_files_stay(tmp_path: Path) -> None:
    for name, text in WHOLE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    remove_unreadable(tmp_path)
    assert all((tmp_path / name).read_text() == text for name, text in WHOLE.items())


@needs_vllm
def test_a_worker_that_sees_only_its_own_device_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    (tmp_path / PEERS).touch()
    set_up_caches(None)
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path) and not (tmp_path / PEERS).exists()
