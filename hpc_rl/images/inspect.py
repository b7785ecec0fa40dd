"""Inspect an image: whether it runs on this machine, and what it contains."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl import __version__
from hpc_rl.errors import UserError
from hpc_rl.images.build import find_builder, sidecar
from hpc_rl.images.definition import Builder
from hpc_rl.images.runtimes import RUNTIMES
from hpc_rl.images.sif import check_image
from hpc_rl.software.versions import __file__ as _VERSIONS_FILE
from hpc_rl.system.files import read_json

TIMEOUT_S = 300
LEAST_SHM = 1 << 30
"""Bytes of /dev/shm below which Ray and data loaders run out of shared memory."""
_GPUS = {"nv": "/dev/nvidiactl", "rocm": "/dev/kfd"}


@dataclass
class ImageReport:
    image: str
    runtime: str
    origin: dict[str, Any]
    """Content of the sidecar, if there is one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Output of hpc_rl.software.versions inside the image."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect_image(image: Path, python: str = "python3") -> ImageReport:
    """Start the image and list what it contains.

    Raises:
        UserError: the image is missing, incomplete, not an image, or built for another architecture.
    """
    check_image(image)
    builder = find_builder()
    report = ImageReport(str(image), builder.version, read_json(sidecar(image), named=True))
    argv = probe_argv(builder, image.absolute(), python, gpu_option())
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"image {image} did not start within {TIMEOUT_S} s") from error
    report.facts = _last_object(done.stdout)
    if not report.facts:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        is_missing = "not found" in reason or "no such file" in reason.lower()
        lacks = f"it has no {python} on its PATH (set --python to another one)" if is_missing else "it does not run"
        report.problems.append(f"{lacks}: {reason}")
    else:
        _judge(report)
    return report


def probe_argv(builder: Builder, image: Path, python: str, gpu: str | None) -> list[str]:
    """Return the command whose last line lists what the image contains; the image needs only Python."""
    runtime = RUNTIMES["auto"]
    options = [*runtime.isolate, *([gpu] if gpu else [])]
    # The text of the file instead of its path: only /dev, /proc and /sys of the host are certain to exist inside.
    # No module of the working folder, which the runtime may bind: -P is unknown to the Python of older images.
    program = f"import sys; sys.path[:] = filter(None, sys.path); exec({Path(_VERSIONS_FILE).read_text()!r})"
    return [builder.program, *runtime.start, *options, str(image), python, "-c", program]


def gpu_option() -> str | None:
    return next((f"--{name}" for name, device in _GPUS.items() if Path(device).exists()), None)


def _judge(report: ImageReport) -> None:
    packages: Mapping[str, str] = report.facts["packages"]
    for module, error in report.facts["broken"].items():
        report.problems.append(f"{module} is installed, but cannot be imported: {error}")
    installed = packages.get("hpc-rl")
    if installed is None:
        report.warnings.append(
            "jobs need hpc-rl, which is not installed in it (hpc-rl image build --from THIS --out NEW.sif)"
        )
    elif installed != __version__:
        report.warnings.append(f"it has hpc-rl {installed}, but jobs are submitted by {__version__}")
    if "torch" not in packages:
        report.warnings.append("torch is not installed in it: jobs need another Python (container.python)")
    if gpu_option() and not report.facts.get("cuda", {}).get("devices"):
        report.problems.append("this machine has GPUs, but torch in the image sees none")
    if report.facts["shm_bytes"] < LEAST_SHM:
        report.warnings.append(f"/dev/shm has {report.facts['shm_bytes']:,} bytes free inside")


def _last_object(stdout: str) -> dict[str, Any]:
    for line in reversed(stdout.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
