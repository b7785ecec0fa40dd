"""What each process of a run sees of two pretended GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rl.runs import devices_seen

TIMEOUT_S = 600
CUDA = "CUDA_VISIBLE_DEVICES"
NONE = {
    CUDA: "",
    "HIP_VISIBLE_DEVICES": "-1",
    "ZE_AFFINITY_MASK": "-1",
    "ASCEND_RT_VISIBLE_DEVICES": "-1",
}


def seen(folder: Path, *words: str) -> dict[str, Any]:
    """Return what each process sees. The job has GPUs 4 and 5 of its node."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HPC_RL_"))}
    environ = {**own, CUDA: "4,5", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, devices_seen.__file__, str(folder), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.long
def test_an_engine_on_a_lent_node_sees_its_own_gpus(tmp_path: Path) -> None:
    found = seen(tmp_path, "lent")
    assert found.pop("its 1 processes") == []
    assert {one[CUDA] for one in found.pop("its 2 processes")} == {"4,5"}
    engines = {"engine 0 of 2": "4", "engine 1 of 2": "5", "engine 0 of 1": "4,5"}
    assert {name: one[CUDA] for name, one in found.items()} == engines


@pytest.mark.long
def test_a_process_sees_its_own_gpus_and_no_others(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert found["the driver"] == found["an environment host"] == NONE
    assert found.pop("a reward process") == 0
    spread = [one[CUDA] for one in found.pop("the processes of engine 0 of 1")]
    assert {name: one[CUDA] for name, one in found.items()} == {
        "the driver": "",
        "an environment host": "",
        "somebody else's actor": "",
        "rank 0": "4",
        "rank 1": "5",
        "engine 0 of 2": "4",
        "engine 1 of 2": "5",
        "engine 0 of 1": "4,5",
    }
    assert spread == ["4,5"] * 2
