"""Check SGLang's API in its newest wheel: `python -m tests.sglang_wheel`.

The wheel is downloaded (about 40 MB) and its Python files unpacked; nothing is installed, and no GPU is needed. It is
kept in a cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tests.vllm_wheels import DOWNLOAD_TIMEOUT_S, ROOT, TIMEOUT_S, unpack

CHECKS = ROOT / "tests" / "rl" / "sglang_api" / "check_api.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hpc-rl" / "sglang-wheels"
    parser.add_argument("--wheels", type=Path, default=cache, help="folder of downloaded wheels (%(default)s)")
    wheel = download(parser.parse_args().wheels)
    print(f"== {wheel.name}", flush=True)
    return run_checks(unpack(wheel)).returncode


def download(folder: Path) -> Path:
    """Download the newest wheel, unless it is there, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), "sglang"], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    return max(folder.glob("sglang-*.whl"), key=lambda path: parse_wheel_filename(path.name)[1])


def run_checks(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the checks in a process of their own, against a SGLang that was unpacked there."""
    options = ["-q", "-p", "no:cacheprovider", "--durations=3", "--override-ini=python_files=check_*.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_TREE": str(tree)}
    command = [sys.executable, "-m", "pytest", *options, str(CHECKS)]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
