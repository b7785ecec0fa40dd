"""The health check's node entry, in a Python with only the standard library."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_rl.formats.node_report import NodeReport, Trial, report_path
from hpc_rl.node.health.facts import read_kfd, read_links, read_nvidia
from hpc_rl.node.health.trials import last_words

ROOT = Path(__file__).parents[3]
BARE_PYTHON = Path(sys.base_prefix) / "bin" / "python3"


def start(attempt: Path, rank: int, nodes: str, *options: str) -> "subprocess.Popen[str]":
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_NODEID": str(rank), "SLURM_MEM_PER_NODE": "3000"}
    command = [BARE_PYTHON, "-S", "-m", "hpc_rl.node.health.check", "--processes", "1", "--device", "cpu", *options]
    return subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HPC_RL_ATTEMPT_DIR": str(attempt), **slurm},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_nodes_report_though_their_python_has_no_torch_and_no_ray(tmp_path: Path) -> None:
    host = os.uname().nodename
    entries = [start(tmp_path, rank, f"{host},{host}") for rank in range(2)]
    for entry in entries:
        _, said = entry.communicate(timeout=600)
        assert entry.returncode == 0, said
    first, second = (NodeReport.read(report_path(tmp_path, rank)) for rank in range(2))
    assert first.round_trip_s is not None and first.round_trip_s > 0 and second.round_trip_s is None
    assert (first.node, second.rank, first.missing) == (host, 1, [])
    assert first.memory <= 3000 << 20 and first.environ["SLURM_MEM_PER_NODE"] == "3000"
    assert "torch" not in first.python.versions and first.all_reduce is None and first.ray is None
    assert first.interface == "lo" and first.interfaces["lo"] == "127.0.0.1" and first.ports_problem == ""


def test_a_node_that_does_not_come_is_named_and_there_is_a_report(tmp_path: Path) -> None:
    entry = start(tmp_path, 0, f"{os.uname().nodename},elsewhere", "--start-timeout", "1")
    _, said = entry.communicate(timeout=600)
    assert (entry.returncode, said) == (0, "hpc-rl: node elsewhere did not start within 1 s\n")
    assert NodeReport.read(report_path(tmp_path, 0)).missing == ["elsewhere"]


def test_it_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    entry = start(tmp_path, 0, "a,b")
    deadline = time.monotonic() + 600
    while not (tmp_path / ".node0.here").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    entry.terminate()
    entry.communicate(timeout=600)
    assert entry.returncode == 143


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    trial = Trial(1.5, 1, {}, "no luck")
    entry = start(tmp_path, 0, os.uname().nodename)
    entry.communicate(timeout=600)
    report = NodeReport.read(report_path(tmp_path, 0))
    changed = NodeReport(**{**report.__dict__, "ray": trial})
    changed.write(tmp_path / "again.json")
    assert NodeReport.read(tmp_path / "again.json") == changed


def test_gpus_as_the_drivers_list_them(tmp_path: Path) -> None:
    assert read_nvidia("580.95.05, NVIDIA H200\n580.95.05, NVIDIA H200\n") == ("580.95.05", ["NVIDIA H200"] * 2)
    assert read_nvidia("") == ("", [])
    for node, units in enumerate((0, 304)):  # the first is a CPU
        folder = tmp_path / "class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\ngfx_target_version 90402\n")
    assert read_kfd(tmp_path) == ("amdgpu", ["gfx 90402"])
    assert read_kfd(tmp_path / "none") == ("", [])


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPHB\tPIX\t0-31\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-31\t0
GPU2\tPHB\tNV18\t X \tSYS\t0-31\t0
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def test_the_links_between_gpus_are_counted() -> None:
    assert read_links(TOPOLOGY) == "2 x NV18, 1 x PHB"
    assert read_links("\tGPU0\nGPU0\t X \n") == read_links("") == ""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("Traceback\nRuntimeError: no luck\nW0101 bye\n", "RuntimeError: no luck"),
        (
            "hpc-rl: torchrun ended with exit code 1; the end of /a/node0.log:\n    last\n",
            "torchrun ended with exit code 1",
        ),
        ("something\nelse\n", "else"),
        ("", "no output"),
        (
            "hpc-rl: raylet exited\nhpc-rl: the end of Ray's raylet.err:\n[C] late\n",
            "raylet exited",
        ),
    ],
)
def test_the_last_words_of_a_trial(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "0.out").write_text(log)
    assert last_words(tmp_path / "0.out") == words
