"""Check vLLM's API in the oldest and the newest wheel for GPUs that setup.cfg admits: `python -m tests.vllm_wheels`.

The wheels are downloaded (about 350 MB each) and their Python files unpacked; nothing is installed, and no GPU is
needed. They are kept in a cache, so that a second run downloads only what is new.
"""

from __future__ import annotations

import argparse
import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
CHECKS = ROOT / "tests" / "rl" / "vllm_contract"
PROCESSES = (
    ("check_arguments.py", "check_requests.py"),
    ("check_calls.py", "check_caches.py", "check_weight_sync.py"),
    ("check_families.py",),
)
"""The first ones pretend a GPU to the whole of vLLM, and the last ones a CPU: each in a process of their own."""
TIMEOUT_S = 1700
DOWNLOAD_TIMEOUT_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hpc-rl" / "vllm-wheels"
    parser.add_argument("--wheels", type=Path, default=cache, help="folder of downloaded wheels (%(default)s)")
    folder = parser.parse_args().wheels
    admitted = admitted_versions()
    wheels = {download(str(specifier), folder) for specifier in (oldest(admitted), admitted)}
    failed = []
    for wheel in sorted(wheels):
        print(f"== {wheel.name}", flush=True)
        failed += [wheel.name] if any(run_checks(files, unpack(wheel)).returncode for files in PROCESSES) else []
    print(f"vllm{admitted}: {'failed for ' + ', '.join(failed) if failed else 'all checks passed'}")
    return bool(failed)


def admitted_versions() -> SpecifierSet:
    """Return the range of versions in setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options.extras_require"]["rl"].split("\n")
    (found,) = [Requirement(line).specifier for line in lines if line and Requirement(line).name == "vllm"]
    return found


def oldest(admitted: SpecifierSet) -> SpecifierSet:
    """Return the lower end of a range as a specifier of this one version."""
    (lowest,) = [specifier.version for specifier in admitted if specifier.operator == ">="]
    return SpecifierSet(f"=={lowest}")


def download(specifier: str, folder: Path) -> Path:
    """Download the newest wheel that a specifier admits, unless it is there, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), f"vllm{specifier}"], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    fitting = {parse_wheel_filename(path.name)[1]: path for path in folder.glob("vllm-*.whl")}
    return fitting[max(version for version in fitting if SpecifierSet(specifier).contains(version))]


def unpack(wheel: Path) -> Path:
    """Return a folder with the wheel's Python files and metadata."""
    tree = wheel.with_suffix("")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))]
        if not all((tree / name).exists() for name in members):
            archive.extractall(tree, members)
    return tree


def run_checks(files: tuple[str, ...], tree: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run files of checks in a process of their own, against a vLLM that was unpacked there, or the installed one."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if tree is not None:
        environment |= {"PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]), "VLLM_TREE": str(tree)}
    options = ["-q", "-p", "no:cacheprovider", "--durations=3", "--override-ini=python_files=check_*.py"]
    command = [sys.executable, "-m", "pytest", *options, *(str(CHECKS / name) for name in files)]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
