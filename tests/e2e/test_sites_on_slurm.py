"""From `site detect` to trained models on different kinds of clusters, without editing the profile."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.sandbox.cluster import Cluster
from tests.sandbox.variants import VARIANTS

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

DATA = ["model.path=model", "data.train_files=sums/train.jsonl", "trainer.device=cpu", "trainer.micro_tokens=1024"]
SFT = [*DATA, "data.train_batch_size=8", "trainer.total_training_steps=2"]
PPO = [
    *(*DATA, "data.max_prompt_length=64", "data.max_response_length=4", "reward.function=exact"),
    *("data.train_batch_size=8", "rollout.n=2", "actor.mini_batch_size=16", "trainer.total_training_steps=1"),
]
OPTIONS = {"sft": SFT, "ppo": PPO}
TRAINED = {"typed-gres": ["sft"], "whole-nodes": ["ppo"], "shared-nodes": ["sft"], "strict": ["sft"]}
"""What is trained on each kind of cluster. The doctor starts Ray and a process group on all of them."""

COVERS_MOST = "strict"
"""The other kinds of clusters are in `make test-long`."""


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and data, created once for all clusters."""
    folder = tmp_path_factory.mktemp("materials")
    make_tiny_model(folder / "model", hidden=32, layers=1)
    Workspace(folder, os.environ).ok("data", "arithmetic", "--out", "sums", "--train", "64", "--val", "8")
    return folder


@pytest.fixture(scope="module", params=[name if name == COVERS_MOST else long(name) for name in VARIANTS])
def cluster(request: pytest.FixtureRequest, slurm_tree: str) -> Iterator[Cluster]:
    yield from sandbox_cluster(f"pytest-{request.param}", **VARIANTS[request.param], tree=slurm_tree)


@pytest.fixture(scope="module")
def workspace(cluster: Cluster, materials: Path) -> Workspace:
    """A folder with the detected profile."""
    folder = cluster.shared / "project"
    shutil.copytree(materials, folder)
    workspace = Workspace(folder, {**cluster.env, "OMP_NUM_THREADS": "1"}, cluster.login(folder))
    workspace.ok("site", "detect", "--yes", "--out", "site.yaml")
    return workspace


def variant_of(cluster: Cluster) -> str:
    return cluster.name.removeprefix("pytest-").rpartition("-")[0]


def test_slurm_takes_what_the_profile_asks_for(workspace: Workspace, cluster: Cluster) -> None:
    (workspace.folder / "train.py").touch()
    script = workspace.ok("submit", "torchrun", "--nodes", "2", "--gpus-per-node", "1", "--dry-run", "--", "train.py")
    cluster.run(["sbatch", "--test-only"], input=script, check=True)
    (asked,) = re.findall(r"^#SBATCH --(?:gres|gpus[a-z-]*)=(.*)$", script, re.MULTILINE)
    assert cluster.spec.all_shapes[0].gpus[0].type in asked
    assert ("#SBATCH --mem" in script) == cluster.spec.memory_allocated


def test_the_doctor_finds_nothing_wrong(workspace: Workspace, cluster: Cluster) -> None:
    on_nodes = [["--on-nodes", "2"]] if variant_of(cluster) not in SPECIAL else []  # SPECIAL starts Ray on two nodes
    for where in ([], *on_nodes):
        checks = json.loads(workspace.ok("doctor", *where, "--json", "trainer.device=cpu"))
        assert not [check for check in checks if check["level"] == "problem"]


@pytest.mark.long
def test_two_nodes_train(workspace: Workspace, cluster: Cluster) -> None:
    for kind in TRAINED[variant_of(cluster)]:
        workspace.ok("submit", kind, "--nodes", "2", "--wait", "--job-name", kind, *OPTIONS[kind])
        status = workspace.status(kind)
        assert (status["state"], status["step"]) == ("COMPLETED", status["total_steps"])
        assert (workspace.folder / "runs" / kind / "model" / "config.json").exists()


def test_what_is_special_about_a_cluster(workspace: Workspace, cluster: Cluster) -> None:
    for check in SPECIAL.get(variant_of(cluster), ()):
        check(workspace, cluster)


def the_plugins_are_satisfied(workspace: Workspace, cluster: Cluster) -> None:
    """The profile is in use without a change: `test_slurm_takes_what_the_profile_asks_for`."""
    values = json.loads(workspace.ok("site", "show", "--json"))["values"]
    expected = {"partition": "gpu", "account": "mlgroup", "qos": "normal", "gpu_option": "gres", "gpu_type": "a100"}
    expected["mem_option"] = "mem-per-cpu"
    assert {key: values[f"slurm.{key}"]["value"] for key in expected} == expected


def explicit_options_win(workspace: Workspace, cluster: Cluster) -> None:
    variables = {"PARTITION": "spot", "ACCOUNT": "teaching", "TIMELIMIT": "5", "OUTPUT": "/tmp/x", "WCKEY": "mine"}
    variables |= {"WAIT": "1"}
    environ = {**workspace.environ, **{f"SBATCH_{name}": value for name, value in variables.items()}}
    elsewhere = Workspace(workspace.folder, environ, workspace.login)
    submit = ["submit", "torchrun", "--job-name", "held", "--time", "1:00:00", "--sbatch", "hold", "trainer.device=cpu"]
    done = elsewhere.hpc_rl(*submit, "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert "from the environment: --wckey=mine (SBATCH_WCKEY)" in done.stderr
    assert "SBATCH_PARTITION=spot is ignored: the job has --partition=gpu" in done.stderr
    job_id = str(workspace.status("held")["job_id"])
    job = cluster.run(["scontrol", "show", "job", "-o", job_id], check=True).stdout
    for field in ("Partition=gpu", "Account=mlgroup", "TimeLimit=01:00:00", f"StdOut={workspace.folder}/runs/held/"):
        assert field in job


def a_silent_controller_does_not_hold_the_user(workspace: Workspace, cluster: Cluster) -> None:
    workspace.ok(
        "submit", "torchrun", "--job-name", "quiet", "--sbatch", "hold", "trainer.device=cpu", "--", "train.py"
    )
    signal_controller(cluster, "STOP")
    try:
        began = time.monotonic()
        status = workspace.status("quiet")
        cancelled = workspace.hpc_rl("cancel", "quiet")
        assert time.monotonic() - began < 2 * 30, (
            "each of them waited for several programs of Slurm, one after the other"
        )
    finally:
        signal_controller(cluster, "CONT")
    assert status["is_last_recorded"] and "Slurm does not answer" in str(status["reason"])
    assert cancelled.returncode == 2 and "of run quiet is not cancelled" in cancelled.stderr
    workspace.ok("cancel", "quiet")
    workspace.ok("cancel", "held")


def ray_starts_with_a_long_tmpdir(workspace: Workspace, cluster: Cluster) -> None:
    program = ["python", "-c", "import os, ray; ray.init(); print(len(ray.nodes()), 'in', os.environ['TMPDIR'])"]
    workspace.ok("submit", "ray", "--nodes", "2", "--job-name", "long", "--wait", "trainer.device=cpu", "--", *program)
    log = workspace.ok("logs", "long")
    for node in cluster.nodes[:2]:
        assert f"node {node}: Ray's files are in /tmp, because the paths of its sockets would have" in log
    assert "2 in /tmp/" in log


def signal_controller(cluster: Cluster, name: str) -> None:
    cluster.exec_on("ctl", ["sh", "-c", f"kill -{name} $(cat {cluster.base}/run/slurmctld.pid)"], check=True)


SPECIAL: dict[str, tuple[Callable[[Workspace, Cluster], None], ...]] = {
    "strict": (
        the_plugins_are_satisfied,
        explicit_options_win,
        a_silent_controller_does_not_hold_the_user,
        ray_starts_with_a_long_tmpdir,
    ),
}
