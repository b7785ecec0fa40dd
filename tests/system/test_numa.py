"""CPUs next to GPUs, on a machine that is made up of files and a program named nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.system.numa import ENV_NUMA, gpu_of_rank, numa_defaults, parse_cpus

HALVES = {"00000000:3B:00.0": "0-1", "00000000:DA:00.0": "2-3"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs, each with half of four CPUs, all of which belong to the job."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    online = tmp_path / "devices" / "system" / "cpu" / "online"
    online.parent.mkdir(parents=True)
    online.write_text("0-3\n")
    lines = []
    for index, (bus, cpus) in enumerate(HALVES.items()):
        place = tmp_path / "bus" / "pci" / "devices" / bus.lower().removeprefix("0000")
        place.mkdir(parents=True)
        (place / "local_cpulist").write_text(f"{cpus}\n")
        lines.append(f"echo '{index}, GPU-{index}{index}, {bus}'\n")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(lines))
    program.chmod(0o755)
    return tmp_path


def near(machine: Path, device: str = "cuda", **environ: str) -> str | None:
    return numa_defaults({"PATH": str(machine), **environ}, device, machine).get(ENV_NUMA)


def test_each_gpu_has_the_cpus_next_to_it(machine: Path) -> None:
    assert near(machine) == "0=0-1;1=2-3"
    assert near(machine, CUDA_VISIBLE_DEVICES="1") == "1=2-3"
    assert near(machine, CUDA_VISIBLE_DEVICES="GPU-11,GPU-00") == "GPU-00=0-1;GPU-11=2-3"
    assert near(machine, CUDA_VISIBLE_DEVICES="MIG-1") is None


def test_nothing_is_bound_without_a_reason(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert near(machine, device="cpu") is near(machine, device="npu") is None
    assert numa_defaults({"PATH": "/nowhere"}, "cuda", machine) == {}
    for place in machine.glob("bus/pci/devices/*/local_cpulist"):
        place.write_text("0-3\n")
    assert near(machine) is None, "one NUMA node"


def test_a_part_of_a_node_stays_as_slurm_has_bound_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert near(machine) is None


def test_the_gpu_of_a_rank() -> None:
    assert gpu_of_rank({"CUDA_VISIBLE_DEVICES": "4,GPU-x"}, 1) == "GPU-x"
    assert gpu_of_rank({}, 1) == "1"


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-2,5\n") == {0, 1, 2, 5}
    assert parse_cpus("") == set()


def test_a_process_and_its_children_are_bound() -> None:
    own = min(os.sched_getaffinity(0))
    program = (
        "import os, subprocess, sys, threading; from hpc_rl.system.numa import bind_near\n"
        "stop = threading.Event(); thread = threading.Thread(target=stop.wait); thread.start()\n"
        "bind_near(os.environ, 'GPU-1')\n"
        "print(os.sched_getaffinity(0), os.sched_getaffinity(thread.native_id), flush=True); stop.set()\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'], check=True)\n"
    )
    environ = {**os.environ, ENV_NUMA: f"GPU-0=0-99999;GPU-1={own}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == f"{{{own}}} {{{own}}}\n{{{own}}}\n", done.stderr
