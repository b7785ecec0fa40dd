"""The checks on torchrun's ranks, on two real processes: what they cover on a node of two CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.formats.acceptance import ENV_SCRATCH, read
from hpc_rl.formats.layouts import Covered
from hpc_rl.run_dir import ENV_GROUP_DIR

TIMEOUT_S = 1800


@pytest.mark.slow
def test_two_ranks_pass_every_check_that_applies(tmp_path: Path) -> None:
    for name in ("group", "scratch", "runs"):
        (tmp_path / name).mkdir(mode=0o700)
    environ = {ENV_GROUP_DIR: str(tmp_path / "group"), ENV_SCRATCH: str(tmp_path / "scratch"), "OMP_NUM_THREADS": "1"}
    program = "hpc_rl.probes.acceptance.on_ranks --device cpu --nodes 1 --processes 2 --results results --folder runs"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *program.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environ}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    lines = {line.name: line for line in read(tmp_path / "results") if line.launcher == "torchrun"}
    assert {line.state for line in lines.values()} == {"passed", "skipped"}, done.stderr
    assert {name for name, line in lines.items() if line.state == "skipped"} == {
        *("bandwidth (between nodes)", "sequence parallel (4)", "compile", "liger")
    }
    covered = {layout for line in lines.values() if line.state == "passed" for layout in line.covers}
    assert covered == {Covered.SHARDED, Covered.SEQUENCE_2, Covered.RESUMED}
