"""Each measurement of `make bench` runs to its end, with as few repetitions as it can have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ROOT / "build/bench"
SMALL = {
    "sft": "--vocabulary 4096 --repeats 1",
    "preferences": "--vocabulary 4096 --repeats 1",
    "scaling": "--repeats 1",
    "ray_up": "--nodes 2 --repeats 1",
    "ppo": "--repeats 1 --steps 1",
    "weight_sync": "--repeats 1",
    "lent_nodes": "--lenders 1 --steps 1",
    "lent_weights": "--repeats 1",
    "carrier": "--repeats 1",
    "generate": "--engine hf --prompts 8 --n 2 --tokens 16 --repeats 1",
    "rollout": "--engine hf --responses 16 --repeats 1",
    "rollout_simulation": "--engines 8",
    "async_rl": "--seeds 1 --steps 8 --sft-steps 5",
    "lora": "--repeats 1",
}


def test_every_measurement_is_here() -> None:
    rule = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert set(re.findall(r"-m benchmarks\.(\w+)", rule)) == set(SMALL)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SMALL)
def test_a_measurement_runs_to_its_end(tmp_path: Path, name: str) -> None:
    """It runs from a copy, so that the published results stay as they are."""
    if not PACKAGES.is_dir():
        pytest.fail(f"{PACKAGES} is missing: make test-long installs it")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results"))
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{PACKAGES}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name].split()]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=1150)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    assert list((tmp_path / "benchmarks/results").glob("*.json"))
