"""Looking into an image: whether it runs here, and what it has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl import __version__
from hpc_rl.errors import UserError
from hpc_rl.host.files import read_json
from hpc_rl.host.versions import __file__ as _VERSIONS_FILE
from hpc_rl.images.build import find_runtime, sidecar
from hpc_rl.images.definition import Runtime
from hpc_rl.images.sif import check_image

TIMEOUT_S = 300
LEAST_SHM = 1 << 30
"""Bytes of /dev/shm under which Ray and data loaders run short."""
_GPUS = {"nv": "/dev/nvidiactl", "rocm": "/dev/kfd"}


@dataclass
class ImageReport:
    image: str
    runtime: str
    origin: dict[str, Any]
    """The sidecar's, if there is one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What hpc_rl.host.versions found inside."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect_image(image: Path, python: str = "python3") -> ImageReport:
    """Start the image and look around in it.

    Raises:
        UserError: it cannot be started by any machine: missing, cut off, or of another kind or architecture.
    """
    check_image(image)
    runtime = find_runtime()
    report = ImageReport(str(image), runtime.version, read_sidecar(image))
    argv = probe_argv(runtime, image.absolute(), python, gpu_option())
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"image {image} did not start within {TIMEOUT_S} s") from error
    report.facts = _last_object(done.stdout)
    if not report.facts:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        _judge_silence(report, said, python)
    else:
        _judge(report)
    return report


def probe_argv(runtime: Runtime, image: Path, python: str, gpu: str | None) -> list[str]:
    """The command whose last line is what the image has; it asks nothing of the image but Python."""
    options = ["--cleanenv", "--no-home", *([gpu] if gpu else [])]
    # Not the file itself: only /dev, /proc and /sys of the host are certain to be seen inside.
    return [runtime.program, "--silent", "exec", *options, str(image), python, "-c", Path(_VERSIONS_FILE).read_text()]


def gpu_option() -> str | None:
    return next((f"--{name}" for name, device in _GPUS.items() if Path(device).exists()), None)


def read_sidecar(image: Path) -> dict[str, Any]:
    return read_json(sidecar(image))


def _judge(report: ImageReport) -> None:
    packages: Mapping[str, str] = report.facts["packages"]
    for module, error in report.facts["broken"].items():
        report.problems.append(f"{module} is installed, but cannot be imported: {error}")
    installed = packages.get("hpc-rl")
    if installed is None:
        report.warnings.append("hpc-rl is not in it: jobs need it (hpc-rl image build --from THIS --out NEW.sif)")
    elif installed != __version__:
        report.warnings.append(f"it has hpc-rl {installed}, and jobs are submitted by {__version__}")
    if "torch" not in packages:
        report.warnings.append("torch is not in it: fine only where jobs bring their own Python (container.python)")
    if gpu_option() and not report.facts.get("cuda", {}).get("devices"):
        report.problems.append("this machine has GPUs, and torch in the image sees none")
    if report.facts["shm_bytes"] < LEAST_SHM:
        report.warnings.append(f"/dev/shm has {report.facts['shm_bytes']:,} bytes free inside")


def _judge_silence(report: ImageReport, said: str, python: str) -> None:
    if "not found" in said or "no such file" in said.lower():
        report.problems.append(f"it has no {python} on its PATH (--python names another one): {said}")
    else:
        report.problems.append(f"it does not run: {said}")


def _last_object(stdout: str) -> dict[str, Any]:
    for line in reversed(stdout.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
