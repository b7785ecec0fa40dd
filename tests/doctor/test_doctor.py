"""The doctor's checks of facts: those of this machine, changed one at a time, and those of real Slurm clusters."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.doctor.checks import Check, as_text, has_problem, merged, ok, problem
from hpc_rl.doctor.job import doctor_config, doctor_job
from hpc_rl.doctor.login import (
    container_checks,
    folder_checks,
    limit_checks,
    python_checks,
    quota_checks,
    slurm_checks,
)
from hpc_rl.doctor.nodes import judge
from hpc_rl.doctor.packages import driver_check, package_checks, unmet
from hpc_rl.errors import UserError
from hpc_rl.formats.node_report import NodeReport, Trial
from hpc_rl.slurm.cluster import Partition, read_partitions
from hpc_rl.system.machine import PythonFacts, python_facts, reach
from tests.fake_slurm import fake_slurm
from tests.helpers import hpc_rl, recorded

TORCH = {"torch": "2.13.0", "ray": "2.60.0", "tensordict": "0.15.3"}
GOOD_PYTHON = PythonFacts(
    "python", "3.11.7", "x86_64", {"hpc-rl": "0.4", **TORCH}, {"hpc-rl": ["tensordict>=0.8; extra == 'train'"]}, "13.0"
)
SUM = {"backend": "nccl", "ranks": 16, "bytes": 1 << 28, "latency_s": 2e-5, "seconds": 0.01, "bandwidth_gb_s": 45.0}
GOOD = NodeReport(
    node="node1", rank=0, nodes=2, missing=[], device="cuda", processes=8,
    environ={"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_CPUS_PER_TASK": "32",
             "SLURM_MEM_PER_NODE": "512000"},
    python=GOOD_PYTHON, round_trip_s=0.03, file_latency_s=0.004, gpu_driver="580.95.05", gpus=["NVIDIA H200"] * 8,
    cpus=32, memory=512000 << 20, shm_total=1 << 39, shm_free=1 << 39, open_files=131072, locked_memory=-1,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}, interface="ib0", interface_problem="",
    ports_problem="", scratch="/tmp", scratch_free=10**12, runtimes=["apptainer"],
    internet={"Hugging Face": "", "wandb": ""},
    all_reduce=Trial(9.0, 0, SUM, ""),
    ray=Trial(12.0, 0, {"hosts": ["node1", "node2"], "cpus": 64, "gpus": 16}, ""),
)  # fmt: skip
"""A node without problems."""


def with_environ(report: NodeReport, **environ: str | None) -> NodeReport:
    merged = {**report.environ, **environ}
    return replace(report, environ={name: value for name, value in merged.items() if value is not None})


@pytest.mark.parametrize(
    ("clusters", "names"),
    [
        ("a", {"Slurm": "24.11.5, controller ctl-a", "partition": "main is UP"}),
        ("a,b", {"Slurm (a)": "controller ctl-a", "Slurm (b)": "controller ctl-b", "partition (b)": "main is UP"}),
        ("all", {"Slurm": "slurm.sbatch.clusters is all"}),
    ],
)
def test_each_of_several_clusters_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clusters: str, names: dict[str, str]
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "scontrol").write_text(
        """#!/bin/bash
case "$*" in
*,*) echo 'scontrol: error: Only one cluster can be used at a time with scontrol' >&2; exit 1 ;;
*config*) name=${1#--clusters=}
  printf 'SLURM_VERSION = 24.11.5\\nKillWait = 100 sec\\nSlurmctl(s) at ctl-%s are UP\\n' "$name"
  printf 'SlurmctldHost[0] = ctl-%s\\nSlurmctld(primary) at ctl-%s is UP\\n' "$name" "$name" ;;
*) echo 'PartitionName=main Default=YES State=UP MaxTime=UNLIMITED DefaultTime=NONE TotalNodes=2 PreemptMode=OFF' ;;
esac
"""
    )
    found = {check.name: check.found for check in slurm_checks(SlurmConfig(sbatch={"clusters": clusters}))}
    for name, part in names.items():
        assert part in found[name], found


def judged(first: NodeReport) -> dict[str, Check]:
    """What is not ok, by name."""
    seen = first.sees_locks is not False
    second = replace(first, node="node2", rank=1, round_trip_s=None, missing=[], sees_locks=seen)
    return {check.name: check for check in judge([first, second]) if check.level != "ok"}


def test_a_node_without_problems_has_ok_checks_alone() -> None:
    assert judged(GOOD) == {}
    lines = as_text(judge([GOOD, replace(GOOD, node="node2", rank=1)])).splitlines()
    assert all(line.startswith("ok ") for line in lines)
    assert any("nccl, 16 ranks on 2 nodes: 45.00 GB/s, 20 us" in line for line in lines)
    assert any("node1, node2: 8 x NVIDIA H200, driver 580.95.05" in line for line in lines)


CASES: dict[str, tuple[Callable[[NodeReport], NodeReport], str, str, str]] = {
    "no driver": (lambda r: replace(r, gpus=[], gpu_driver=""), "GPUs", "problem", "the node has no driver"),
    "few GPUs": (
        lambda r: with_environ(replace(r, gpus=r.gpus[:4]), SLURM_GPUS_ON_NODE="4", CUDA_VISIBLE_DEVICES="0,1,2,3"),
        "GPUs", "problem", "8 requested",
    ),
    "not told": (lambda r: with_environ(r, CUDA_VISIBLE_DEVICES=None), "visible GPUs", "warning", "whole nodes"),
    "told wrong": (lambda r: with_environ(r, CUDA_VISIBLE_DEVICES="0"), "visible GPUs", "problem", "Slurm grants 8"),
    "few CPUs": (lambda r: replace(r, cpus=1), "CPUs", "problem", "1 granted, 32 requested"),
    "little memory": (lambda r: replace(r, memory=1 << 30), "memory", "problem", "1.0 GiB granted, 500.0 requested"),
    "no shm": (lambda r: replace(r, shm_free=1 << 26), "/dev/shm", "problem", "Ray cannot start"),
    "small shm": (lambda r: replace(r, shm_free=1 << 30), "/dev/shm", "warning", "1.0 of 512.0 GiB"),
    "few files": (lambda r: replace(r, open_files=256), "open files", "problem", "at most 256"),
    "some files": (lambda r: replace(r, open_files=4096), "open files", "warning", "at most 4096"),
    "locked": (lambda r: replace(r, locked_memory=1 << 16), "locked memory", "warning", "InfiniBand"),
    "slow interface": (lambda r: replace(r, interface="eth0"), "interface", "warning", "slurm.interface=ib0"),
    "no interface": (
        lambda r: replace(r, interface="", interface_problem="no route"), "interface", "problem", "no route",
    ),
    "ports": (lambda r: replace(r, ports_problem="no 512 free"), "ports", "problem", "no 512 free"),
    "full disk": (lambda r: replace(r, scratch_free=10**8), "temporary folder", "warning", "0 GB free in /tmp"),
    "noexec": (
        lambda r: replace(r, scratch_problem="files in /tmp cannot be executed"), "temporary folder", "warning",
        "files in /tmp cannot be executed",
    ),
    "slow files": (lambda r: replace(r, file_latency_s=0.5), "run directory", "warning", "500.0 ms"),
    "late files": (lambda r: replace(r, round_trip_s=9.0), "shared folder", "warning", "9000 ms"),
    "missing": (lambda r: replace(r, missing=["node2"]), "shared folder", "problem", "node2 wrote no report"),
    "local locks": (lambda r: replace(r, sees_locks=False), "file locks", "problem", "tuneUseGlobalFileLocks=true"),
    "offline": (lambda r: replace(r, internet={"wandb": "no route"}), "internet", "warning", "wandb_mode=offline"),
    "old driver": (lambda r: replace(r, gpu_driver="550.54.15"), "torch and driver", "problem", "needs driver 580"),
    "no torch": (
        lambda r: replace(r, all_reduce=None, python=replace(GOOD_PYTHON, versions={"ray": "2.60.0"})),
        "all-reduce", "problem", "no torch in python",
    ),
    "no Ray": (
        lambda r: replace(r, ray=None, python=replace(GOOD_PYTHON, versions={"torch": "2.13.0"})),
        "Ray cluster", "warning", "not tested",
    ),
    "cut off": (lambda r: replace(r, ray=None), "Ray cluster", "problem", "ended before this test"),
    "CPU torch": (
        lambda r: replace(r, all_reduce=Trial(9.0, 0, {**SUM, "backend": "gloo"}, "")),
        "all-reduce", "problem", "torch sees no GPU",
    ),
    "Ethernet": (
        lambda r: replace(r, all_reduce=Trial(9.0, 0, {**SUM, "bandwidth_gb_s": 0.9}, "")),
        "all-reduce", "warning", "0.90 GB/s",
    ),
    "killed": (
        lambda r: replace(r, all_reduce=Trial(4.0, 137, {}, "bye")), "all-reduce", "problem", "request more memory",
    ),
    "hung": (lambda r: replace(r, ray=Trial(180.0, 124, {}, "waiting")), "Ray cluster", "problem", "it took too long"),
    "wrong token": (
        lambda r: replace(r, ray=Trial(9.0, 1, {}, "RPC error: InvalidAuthToken")),
        "Ray cluster", "problem", "RAY_AUTH_TOKEN_PATH` to the same values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_found_with_its_remedy(case: str) -> None:
    change, name, level, said = CASES[case]
    found = judged(change(GOOD))
    assert name in found, found
    assert found[name].level == level
    assert said in f"{found[name].found}; {found[name].remedy}"
    assert set(found) <= {name, "packages", "Ray", "torch and driver"}, "one fault, one complaint"


def test_a_node_without_a_report_is_a_problem() -> None:
    assert "of 2 nodes, 1 wrote no report" in judge([GOOD])[0].found


def test_a_job_on_cpus_wants_no_gpus() -> None:
    plain = replace(GOOD, device="cpu", processes=1, gpus=[], gpu_driver="", environ={})
    assert judged(replace(plain, all_reduce=Trial(3.0, 0, {**SUM, "backend": "gloo"}, ""))) == {}


def test_offline_settings_make_missing_internet_fine() -> None:
    cut = replace(GOOD, internet={"Hugging Face": "no route", "wandb": "no route"})
    assert judged(with_environ(cut, HF_HUB_OFFLINE="1", WANDB_MODE="offline")) == {}


def test_the_same_of_several_nodes_is_one_line() -> None:
    checks = [replace(ok("CPUs", "4"), nodes=(f"n{i}",)) for i in range(6)]
    checks.append(replace(problem("CPUs", "1", "more"), nodes=("n9",)))
    found = merged(checks)
    assert [len(check.nodes) for check in found] == [6, 1] and has_problem(found)
    assert as_text(found).splitlines() == ["ok       CPUs  n0 and 5 others: 4", "problem  CPUs  n9: 1; more"]


def test_packages_of_this_python_fit() -> None:
    here = python_facts()
    assert here.versions["torch"] and unmet(here) == []
    assert [check.level for check in package_checks(here)] == ["ok", "ok", "ok"]


def test_packages_that_do_not_fit() -> None:
    arm = replace(GOOD_PYTHON, machine="aarch64", versions={**GOOD_PYTHON.versions, "tensordict": "0.1.2"})
    (_, packages, _) = package_checks(arm)
    assert packages.level == "problem" and "tensordict 0.1.2, but hpc-rl 0.4 requires >=0.8" in packages.found
    assert "aarch64 begin with 0.8" in packages.remedy
    pinned = {"vllm": ["torch==2.14.0; platform_machine == 'x86_64'", "torch==2.1.0; platform_machine == 's390x'"]}
    engine = replace(GOOD_PYTHON, versions={**GOOD_PYTHON.versions, "vllm": "0.33.0"}, requires=pinned)
    assert unmet(engine) == ["torch 2.13.0, but vllm 0.33.0 requires ==2.14.0"]
    old = replace(GOOD_PYTHON, version="3.10.2", versions={**GOOD_PYTHON.versions, "ray": "2.40.0"})
    assert [check.level for check in package_checks(old)] == ["problem", "ok", "problem"]


@pytest.mark.parametrize(
    ("torch", "torchvision", "level"),
    [
        ("2.13.0+cu126", "0.28.0+cu126", "ok"),
        ("2.13.0+cu126", "0.28.0", "problem"),
        ("2.13.0+cpu", "0.28.0+cu130", "problem"),
        ("2.13.0", "0.28.0", "ok"),
        ("2.13.0a0+git1234", "0.28.0a0+git5678", "ok"),
    ],
)
def test_torchvision_of_another_index(torch: str, torchvision: str, level: str) -> None:
    versions = {**GOOD_PYTHON.versions, "torch": torch, "torchvision": torchvision}
    (_, packages, _) = package_checks(replace(GOOD_PYTHON, versions=versions))
    assert packages.level == level
    if torch == "2.13.0+cu126" and level == "problem":
        assert "torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cu126" in packages.remedy


@pytest.mark.parametrize(
    ("cuda", "driver", "level"),
    [("13.0", "580.65", "ok"), ("13.0", "575.1", "problem"), ("12.8", "525.60.13", "ok"), ("12.8", "470.1", "problem"),
     ("14.0", "600.1", "ok"), (None, "580.1", None), ("13.0", "", None)],
)  # fmt: skip
def test_torch_against_the_driver(cuda: str | None, driver: str, level: str | None) -> None:
    check = driver_check(replace(GOOD_PYTHON, torch_cuda=cuda), driver)
    assert (check.level if check else None) == level


RECORDED = {one.name: one for one in read_partitions(recorded("typed-gres-22.05.8", "show-partition"))}
DEBUG = replace(RECORDED["gpu"], name="debug", max_time="UNLIMITED", default_time="NONE")
SHORT = replace(RECORDED["cpu"], name="short", max_time="00:10:00", default_time="00:01:00", preempt_mode="REQUEUE")
PREEMPTS = {"PreemptType": "preempt/partition_prio"}


@pytest.mark.parametrize(
    ("options", "partitions", "config", "expected"),
    [
        ({}, [DEBUG, SHORT], {}, ["ok", "ok"]),
        ({}, [SHORT], {}, ["warning"]),
        ({"partition": "gpu"}, [DEBUG, SHORT], {}, ["problem"]),
        ({"partition": "short", "time": "1:00:00"}, [DEBUG, SHORT], PREEMPTS, ["problem", "warning"]),
        ({"partition": "short"}, [DEBUG, SHORT], {}, ["warning", "ok"]),
        ({"partition": "short", "time": "10:00"}, [DEBUG, SHORT], {}, ["ok", "ok"]),
        ({}, [replace(DEBUG, state="DOWN")], PREEMPTS, ["problem", "ok"]),
    ],
)
def test_partitions(
    options: dict[str, str], partitions: list[Partition], config: dict[str, str], expected: list[str]
) -> None:
    checks = list(limit_checks(SlurmConfig(**options), config, partitions))
    assert [check.level for check in checks] == expected, as_text(checks)


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    assert not has_problem(folder_checks(tmp_path / "runs" / "none", None))
    assert [path.name for path in tmp_path.iterdir()] == []
    (nowhere,) = folder_checks(Path("/proc/self/fd"), None)
    assert nowhere.level == "problem"


def test_quotas() -> None:
    table = """Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
/dev/sda1 1000000  9000000 10000000          10       0       0
nfs:/home  9500000* 9000000 10000000   6days    10       0       0
nfs:/data  9500000       0 10000000            10       0       0
"""
    assert [check.level for check in quota_checks(table)] == ["ok", "problem", "warning"]
    assert quota_checks("Disk quotas for user root (uid 0): none\n") == []


def test_another_python_answers_for_itself_or_is_a_problem(tmp_path: Path) -> None:
    (absent,) = python_checks(str(tmp_path / "python"))
    assert absent.level == "problem" and "No such file" in absent.found
    link = tmp_path / "python"
    link.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    link.chmod(0o755)
    assert [check.name for check in python_checks(str(link))] == ["Python", "packages", "Ray"]
    (other,) = python_checks("/bin/echo")
    assert other.level == "problem"


def test_an_address_that_does_not_answer_has_a_reason() -> None:
    reasons = reach({"closed": "http://127.0.0.1:9", "odd": "nonsense"}, timeout_s=5)
    assert "refused" in reasons["closed"] and "unknown url type" in reasons["odd"]


def test_the_doctor_takes_no_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="is not empty"):
        doctor_job(2, ["trainer.device=cpu"], {}, tmp_path, None, local=True)
    job = doctor_job(2, ["trainer.device=cpu"], {"slurm.mem": "2G"}, tmp_path / "new", None, local=True)
    assert (job.config.trainer.nnodes, job.config.slurm.time, job.config.slurm.requeue) == (2, "10:00", False)
    longer = doctor_job(1, ["trainer.device=cpu", "slurm.time=30:00"], {}, tmp_path / "longer", None, local=True)
    assert longer.config.slurm.time == "30:00"
    for overrides, settings in ((["trainer.nnodes=3"], {}), ([], {"trainer.nnodes": 3})):
        with pytest.raises(UserError, match="--on-nodes"):
            doctor_job(2, overrides, settings, None, None, local=True)


def test_the_doctor_of_jobs_in_an_image(tmp_path: Path) -> None:
    options = ["trainer.device=cpu", f"container.image={tmp_path}/none.sif"]
    found, *_ = container_checks(doctor_config(options, {}, None))
    assert found.level == "problem" and "none.sif" in found.found
    with pytest.raises(UserError, match=r"none\.sif"):
        doctor_job(1, options, {}, tmp_path / "run", None, local=True)
    pyxis = ["trainer.device=cpu", "container.image=docker://a/b", "container.runtime=pyxis"]
    with pytest.raises(UserError, match="does not work with --local"):
        doctor_job(1, pyxis, {}, tmp_path / "run", None, local=True)
    assert list(tmp_path.iterdir()) == []


CLOSED = "http://127.0.0.1:9"


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PATH": "/usr/bin:/bin", "HF_ENDPOINT": CLOSED, "WANDB_BASE_URL": CLOSED}
    return hpc_rl(*arguments, folder=folder, environ=environ)


def test_the_commands(tmp_path: Path) -> None:
    here = command(tmp_path, "doctor", "--local", "--json")
    assert here.returncode == 0, here.stdout + here.stderr
    assert {"runs", "free space", "Python", "packages", "Ray", "internet"} <= {
        c["name"] for c in json.loads(here.stdout)
    }
    refused = command(tmp_path, "doctor", "--job-name", "mine")
    assert refused.returncode == 2 and "leave out --job-name" in refused.stderr
    (tmp_path / "job.out").write_text("fine\nCUDA out of memory. Tried to allocate\n")
    explained = command(tmp_path, "explain", "job.out").stdout
    assert explained.startswith("CUDA out of memory\n  job.out: CUDA out of memory. Tried") and "fix:" in explained
    (tmp_path / "odd.out").write_text("fine\nOddError: never seen\n")
    (tmp_path / "other.out").write_text("fine\nsome error: never seen\n")
    assert "the cause is not a known failure" in command(tmp_path, "explain", "other.out").stdout
    found = json.loads(command(tmp_path, "explain", "odd.out", "--json").stdout)
    assert found["findings"][0]["title"] == "An exception in the program" and found["last_message"] == []
    assert (found["state"], found["last_errors"]) == (None, ["OddError: never seen"])
    missing = command(tmp_path, "explain", "nothing")
    assert missing.returncode == 2 and "no run 'nothing'" in missing.stderr
