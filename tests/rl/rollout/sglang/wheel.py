"""Check SGLang's API in its newest wheel: `python -m tests.rl.rollout.sglang.wheel`.

The wheel is downloaded (about 40 MB) and its Python files unpacked; nothing is installed, and no GPU is needed. It is
kept in a cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tests.vllm_wheels import DOWNLOAD_TIMEOUT_S, ROOT, TIMEOUT_S, unpack


def main() -> int:
    """Run the checks in a process of their own, against a SGLang that is unpacked beside its wheel."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hpc-rl" / "sglang-wheels"
    wheel = download(cache)
    print(f"== {wheel.name}", flush=True)
    options = ["-q", "-p", "no:cacheprovider", "--durations=3", "--override-ini=python_files=check_*.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_TREE": str(unpack(wheel))}
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name("api") / "check_api.py")]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False).returncode


def download(folder: Path) -> Path:
    """Download the newest wheel, unless it is there, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), "sglang"], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    return max(folder.glob("sglang-*.whl"), key=lambda path: parse_wheel_filename(path.name)[1])


if __name__ == "__main__":
    sys.exit(main())
