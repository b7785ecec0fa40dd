"""`hpc-rl doctor` and `explain` on a real Slurm."""

import json
import re
import uuid

import pytest

from tests.e2e.workspace import Workspace
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
HUNGRY = "held = [bytearray(b'x' * (1 << 20)) for _ in range(4000)]\n"
"""Allocates 4 GB, a megabyte at a time."""


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    folder = slurm_cluster.shared / f"doctor-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "hungry.py").write_text(HUNGRY)
    return Workspace(folder, {**slurm_cluster.env, "OMP_NUM_THREADS": "1"})


def test_on_the_login_node(workspace: Workspace) -> None:
    checks = {check["name"]: check for check in json.loads(workspace.ok("doctor", "--json"))}
    assert "controller ctl" in checks["Slurm"]["found"]
    assert checks["accounting"]["found"].startswith("none")
    assert checks["partition"]["found"] == "debug is UP, at most UNLIMITED, by default NONE, 4 nodes"
    assert checks["preemption"]["level"] == "ok"
    short = workspace.hpc_rl("doctor", "--partition", "short", "--time", "1:00:00", "--json")
    assert short.returncode == 1
    (too_long,) = [check for check in json.loads(short.stdout) if check["level"] == "problem"]
    assert "short is UP, at most 00:10:00" in too_long["found"] and "--time" in too_long["remedy"]


@pytest.mark.slow
def test_on_two_nodes_and_a_job_that_is_killed_for_lack_of_memory(workspace: Workspace) -> None:
    options = ["--mem", "500M", "--job-name", "hungry", "trainer.device=cpu"]
    workspace.ok("submit", "torchrun", *options, "--", "hungry.py")

    asked = ["--on-nodes", "2", "--cpus-per-task", "1", "--mem", "2G", "trainer.device=cpu", "--json"]
    checks = {check["name"]: check for check in json.loads(workspace.ok("doctor", *asked))}
    assert checks["shared folder"]["found"].startswith("2 nodes read each other's files")
    assert checks["all-reduce"]["found"].startswith("gloo, 2 ranks on 2 nodes: ")
    assert checks["Ray cluster"]["found"].startswith("started and stopped on 2 nodes with 2 CPUs and 0 GPUs in ")
    assert (checks["CPUs"]["found"], len(checks["CPUs"]["nodes"])) == ("1 granted, 1 requested", 2)
    assert checks["memory"]["found"] == "2.0 GiB granted, 2.0 requested"
    assert checks["interface"]["found"].startswith("eth0 of ")
    assert [path.name for path in (workspace.folder / "runs").iterdir()] == ["hungry"]

    workspace.wait_until(lambda: workspace.status("hungry")["state"] not in ("PENDING", "RUNNING"), "the end of hungry")
    assert "\nKilled for lack of memory\n" in "\n" + workspace.ok("status", "hungry")
    explained = workspace.ok("explain", "hungry")
    assert "failed with exit code 137 (killed for lack of memory: request more --mem" in explained
    assert "Request more memory (`--mem 64G`" in explained


@pytest.mark.long
@pytest.mark.slow
def test_training_checks_on_two_nodes(workspace: Workspace) -> None:
    home = workspace.folder / "home"
    home.mkdir()
    own = Workspace(workspace.folder, {**workspace.environ, "HOME": str(home)}, workspace.login)
    asked = ["--on-nodes", "2", "--train", "--cpus-per-task", "2", "--mem", "6000M", "trainer.device=cpu"]
    out = own.ok("doctor", *asked)
    report = out[out.index("hpc-rl doctor --train, ") :].splitlines()
    lines = {re.split(r" {2,}", line)[1]: line for line in report if line.startswith(("ok ", "skipped "))}
    assert lines["sharding (full)"].startswith("ok ") and lines["checkpoint and resume"].startswith("ok ")
    assert (
        lines["bandwidth (between nodes)"].startswith("ok ") and "gloo, 2 ranks" in lines["bandwidth (between nodes)"]
    )
    assert lines["weight transfer (vllm, same devices, host)"].startswith("ok ")
    assert lines["weight transfer (hf, other devices, host, 1 + 1)"].startswith("ok ")
    assert lines["sleep and wake"].startswith("skipped ") and "applies to GPUs only" in lines["sleep and wake"]
    assert "tokens/s on 2 processes" in lines["speed of PPO"]
    profile = (home / ".config" / "hpc-rl" / "site.yaml").read_text()
    assert all(line.strip() in profile for line in report)
    (page,) = (workspace.folder / "runs").glob("doctor-*.md")
    assert page.read_text() == "```text\n" + "\n".join(report) + "\n```\n"
    named = report[report.index("layouts that were covered:") + 1 :]
    assert named[0] == "  checkpoint and resume on 2 or more ranks"
    own.ok("site", "show")
