import os
from pathlib import Path

import pytest

from hpc_rl.formats.usage import Gpu
from hpc_rl.node.gpus import measure_gpus, parse_nvidia


def fake_nvidia_smi(folder: Path, script: str) -> str:
    """Return a PATH whose nvidia-smi runs this script."""
    (folder / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_gpus_of_nvidia() -> None:
    assert parse_nvidia("0, 11, 81559\n100, 81000, 81559\n") == (
        Gpu(0.0, 11 * 2**20 / 1e9, 81559 * 2**20 / 1e9),
        Gpu(1.0, 81000 * 2**20 / 1e9, 81559 * 2**20 / 1e9),
    )
    assert parse_nvidia("[N/A], 100, 4864\n")[0].busy is None
    assert parse_nvidia("No devices were found\n") == ()


def test_only_the_jobs_gpus_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_nvidia_smi(tmp_path, f'echo "$*" >> {tmp_path}/asked; echo "1, 1, 1"')
    monkeypatch.setenv("PATH", path)
    for visible, count in ((None, 1), ("2,3", 1), ("", 0), ("NoDevFiles", 0), ("-1", 0)):
        environ = {"PATH": path} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        assert len(measure_gpus(environ)) == count
    assert "--id=2,3" in (tmp_path / "asked").read_text().splitlines()[1]


@pytest.mark.parametrize("script", ["exit 9", "echo 'Failed to initialize NVML'", "kill -9 $$"])
def test_a_driver_in_trouble_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, script))
    assert measure_gpus(os.environ) == ()


def test_gpus_of_amd_by_their_kernel_module(tmp_path: Path) -> None:
    for card, busy in (("card0", None), ("card1", 55), ("card2", 3)):
        folder = tmp_path / card / "device"
        folder.mkdir(parents=True)
        if busy is not None:
            for name, value in (("gpu_busy_percent", busy), ("mem_info_vram_used", 8e9), ("mem_info_vram_total", 64e9)):
                (folder / name).write_text(f"{value:.0f}\n")
    assert measure_gpus({"PATH": ""}, tmp_path) == (Gpu(0.55, 8.0, 64.0), Gpu(0.03, 8.0, 64.0))
    assert measure_gpus({"PATH": "", "ROCR_VISIBLE_DEVICES": "1"}, tmp_path) == (Gpu(0.03, 8.0, 64.0),)
