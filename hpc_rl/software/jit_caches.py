"""Folders for code that libraries compile while a job runs: on the node's own disk, and nobody else's.

The libraries' own defaults are in the home folder, which is usually on NFS. There, all ranks of all jobs share them, a
stale file handle ends a job, and each start reads thousands of small files over the network.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hpc_rl.system.disk import file_system
from hpc_rl.system.ownership import keeps_entries, private_folder
from hpc_rl.system.scratch import local_folder

VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable of a library -> name of its folder."""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def jit_cache_defaults(environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return variables for the folders, which each library creates when it needs it.

    The folders stay on the node for later jobs of the same user, unless the node's disk is memory, or the place is not
    safe. Then they end with the job.

    Args:
        scratch: private folder of the job on this node's disk, which is removed at its end.
    """
    parent = cache_folder(local_folder(environ)) or scratch / "jit"
    return {name: str(parent / folder) for name, folder in VARIABLES.items()}


def cache_folder(base: Path) -> Path | None:
    """Create this user's folder that outlives jobs, and return its part for this installation.

    Returns:
        None if it cannot be kept there: `base` is memory, another user could replace or read the folder, or it cannot
        be written.
    """
    folder = base / f"hpc-rl-cache-{os.getuid()}"
    if file_system(base, Path("/proc/self/mounts").read_text()) in _IN_MEMORY:
        return None
    try:
        if not keeps_entries(base) or not private_folder(folder):
            return None
        boot = f"{zlib.crc32(_BOOT.read_bytes()):08x}"
        _remove_earlier_boots(folder, boot)
        return folder / boot / f"{zlib.crc32(installation().encode()):08x}"
    except OSError:
        return None


def installation() -> str:
    """Return what compiled code depends on: a program of one image may not load in another."""
    versions = []
    for package in ("torch", "triton", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return "\n".join([sys.prefix, platform.python_version(), *platform.libc_ver(), *versions])


def _remove_earlier_boots(folder: Path, boot: str) -> None:
    """Remove what was written before the node started: a crash may have left files that are incomplete."""
    for earlier in folder.iterdir():
        if earlier.name != boot:
            shutil.rmtree(earlier, ignore_errors=True)
