"""The compile caches of a vLLM worker: a folder for each set of devices, without files that a killed engine left.

A graph that vLLM has compiled names the device that it computes on. An engine on one GPU sees no other, so its
device is always the first one. The workers of an engine with tensor parallelism see all GPUs of the job, and the keys
of vLLM's caches have the rank of a worker but not its device (compilation/decorators.py, compilation/backends.py).

vLLM, torch and Triton replace most of their files in one step. The exceptions are in IN_PLACE: vLLM cannot start if one
of them is incomplete.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IN_PLACE: dict[str, Callable[[str], Any]] = {
    "torch_compile_cache/*/rank_*/**/vllm_compile_cache.py": ast.literal_eval,  # CompilerManager.save_to_file
    "gpu_p2p_access_cache_for_*.json": json.loads,  # all_reduce_utils.gpu_p2p_access_check
}
"""Files that vLLM writes in place, below its folder, and how it reads them."""


def set_up_caches(gpus: Sequence[int] | None) -> None:
    """Choose the folder for what this worker compiles, and remove the files there that vLLM could not read.

    Args:
        gpus: physical numbers of the GPUs of all workers of the engine on this node; None if this worker sees no other
            GPU than its own.
    """
    import vllm.envs as envs

    root = Path(envs.VLLM_CACHE_ROOT)
    if gpus is not None:
        root = folder_of(root, visible_devices(gpus))
        os.environ["VLLM_CACHE_ROOT"] = str(root)
    remove_unreadable(root)


def folder_of(root: Path, devices: Sequence[int]) -> Path:
    """Return the folder of an engine whose workers, in the order of their ranks, have these devices."""
    return root / f"devices-{'-'.join(map(str, devices))}"


def visible_devices(gpus: Sequence[int]) -> list[int]:
    """Return the numbers by which torch calls these GPUs in this process: what compiled graphs contain."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import set_assigned_physical_gpu_ids

    set_assigned_physical_gpu_ids(list(gpus))  # as the worker itself does later
    return [current_platform.logical_device_id_to_visible_device_id(local) for local in range(len(gpus))]


def remove_unreadable(root: Path) -> None:
    """Remove files that vLLM would fail to read, because the process that wrote them was killed."""
    for pattern, read in IN_PLACE.items():
        for file in root.glob(pattern):
            try:
                read(file.read_text())
            except (ValueError, SyntaxError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                with contextlib.suppress(OSError):
                    file.unlink()
            except OSError:
                continue  # another engine has removed it, or vLLM will tell what is wrong with it
