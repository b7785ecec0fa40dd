"""Utilisation and memory of this node's GPUs, as their drivers report them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.formats.usage import Gpu

TIMEOUT_S = 20
"""A faulty driver answers late or never."""
_QUERY = ("--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


def measure_gpus(environ: Mapping[str, str], drm: Path = Path("/sys/class/drm")) -> tuple[Gpu, ...]:
    """Measure the GPUs that the job may use. Returns none if the driver does not answer.

    Args:
        environ: CUDA_VISIBLE_DEVICES and similar variables list the GPUs of the job.
    """
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is not None:
        return _nvidia(environ.get("CUDA_VISIBLE_DEVICES"))
    visible = environ.get("ROCR_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
    cards = [gpu for folder in sorted(drm.glob("card[0-9]*/device")) if (gpu := _amd(folder))]
    return tuple(gpu for index, gpu in enumerate(cards) if visible is None or str(index) in visible.split(","))


def parse_nvidia(text: str) -> tuple[Gpu, ...]:
    """Parse the output of nvidia-smi: percent, MiB, MiB, or [N/A] for an unknown value (nvidia-smi(1))."""
    gpus = []
    for line in text.splitlines():
        values = [_number(word) for word in line.split(",")]
        if len(values) == 3 and values[1] is not None and values[2] is not None:
            busy = None if values[0] is None else values[0] / 100
            gpus.append(Gpu(busy, values[1] * 2**20 / 1e9, values[2] * 2**20 / 1e9))
    return tuple(gpus)


def _nvidia(visible: str | None) -> tuple[Gpu, ...]:
    if visible is not None and not all(name.isdigit() or name.startswith("GPU-") for name in visible.split(",")):
        return ()  # none ("", "-1", "NoDevFiles"), or MIG devices, which nvidia-smi does not measure
    chosen = [] if visible is None else [f"--id={visible}"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *_QUERY, *chosen], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_nvidia(done.stdout) if done.returncode == 0 else ()


def _amd(folder: Path) -> Gpu | None:
    """Measure a card by the files of its kernel module (https://docs.kernel.org/gpu/amdgpu/: percent, bytes)."""
    with contextlib.suppress(OSError, ValueError):
        used, total = (int((folder / f"mem_info_vram_{name}").read_text()) for name in ("used", "total"))
        return Gpu(int((folder / "gpu_busy_percent").read_text()) / 100, used / 1e9, total / 1e9)
    return None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
