"""What there is to run with: versions of packages, devices, shared memory. Prints one JSON object.

    python -m hpc_rl.host.versions [MODULE...]

Fails where an installed package, or one of the modules named, cannot be imported. `hpc-rl image check` runs this text
in images that lack hpc-rl, so that it needs the standard library alone, and Python 3.8.
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
"""Those that need no GPU to be imported."""
_FABRIC = Path("/sys/class/infiniband")
_SHM = Path("/dev/shm")


def facts(modules: list[str]) -> dict[str, object]:
    """Versions, devices and shared memory; `broken` has what cannot be imported, and why."""
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
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cuda() -> dict[str, object] | None:
    """What torch was built for, and the GPUs that it sees; None without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {"built_for": torch.version.cuda or torch.version.hip, "devices": torch.cuda.device_count()}


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_frsize * found.f_bavail


if __name__ == "__main__":
    seen = facts(sys.argv[1:])
    print(json.dumps(seen))
    sys.exit(1 if seen["broken"] else 0)
