"""Facts about the software environment: package versions, devices, shared memory. Prints one JSON object.

    python -m hpc_rl.software.versions [MODULE...]

Exits with code 1 if an installed package or one of the given modules cannot be imported. `hpc-rl image check` runs this
text in images without hpc-rl, so it uses only the standard library and works with Python 3.8.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("hpc-rl", "torch", "transformers", "tensordict", "ray", "vllm", "datasets", "wandb", "flash-attn")
IMPORTED = ("torch", "transformers", "ray")
"""Packages that can be imported without a GPU."""
_FABRIC = Path("/sys/class/infiniband")
_SHM = Path("/dev/shm")


def facts(modules: list[str]) -> dict[str, object]:
    """Return versions, devices and shared memory. `broken` has the modules that cannot be imported, with the error."""
    packages = {name: version for name in PACKAGES if (version := version_of(name))}
    broken: dict[str, str] = {}
    for module in [*modules, *(name for name in IMPORTED if name in packages)]:
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            broken[module] = f"{type(error).__name__}: {error}"
    return {
        **{"python": platform.python_version(), "executable": sys.executable, "machine": platform.machine()},
        **{"packages": packages, "broken": broken, "cuda": cuda()},
        "infiniband": sorted(device.name for device in _FABRIC.iterdir()) if _FABRIC.is_dir() else [],
        "shm_bytes": free_bytes(_SHM) if _SHM.is_dir() else 0,
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cuda() -> dict[str, object] | None:
    """Return the platform that torch was built for and the number of visible GPUs, or None without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {"built_for": torch.version.cuda or torch.version.hip, "devices": torch.cuda.device_count()}


def free_bytes(folder: Path) -> int:
    """Return the free space of a folder's file system, in bytes."""
    found = os.statvfs(folder)
    return found.f_frsize * found.f_bavail


if __name__ == "__main__":
    seen = facts(sys.argv[1:])
    print(json.dumps(seen))
    sys.exit(1 if seen["broken"] else 0)
