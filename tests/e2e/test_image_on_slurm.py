"""Jobs inside a real image on a real Slurm: stopped, resumed and exported; killed; and Ray."""

import os
import shutil
import sys
import uuid
from pathlib import Path

import pytest

from tests.e2e.test_real_image import OPTIONS
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

PACKAGES = next(path for path in sys.path if path.endswith("-packages"))
INSIDE = [
    *("--nodes", "2", "--image", "hpc-rl.sif", f"container.binds=[{PACKAGES}]"),
    f"container.options=[{','.join(OPTIONS)}]",
]
PYTHONPATH = f"slurm.env.PYTHONPATH={PACKAGES}"
SUMS = [
    *("model.path=model", "data.train_files=sums/train.jsonl", "trainer.device=cpu", "trainer.micro_tokens=1024"),
    *("data.max_prompt_length=64", "data.max_response_length=4", "reward.function=exact"),
    *("data.train_batch_size=8", "rollout.n=2", "actor.mini_batch_size=16"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster, built_image: Path, apptainer_environ: dict[str, str]) -> Workspace:
    environ = {**slurm_cluster.env, "PATH": apptainer_environ["PATH"], "HF_TOKEN": "hf_not_to_be_seen"}
    workspace = make_workspace(slurm_cluster.shared / f"image-{uuid.uuid4().hex[:8]}", environ)
    shutil.copy(built_image, workspace.folder / "hpc-rl.sif")
    return workspace


@pytest.mark.long
def test_a_run_in_an_image_is_stopped_and_resumed(workspace: Workspace) -> None:
    job = ["submit", "sft", "--job-name", "inside", *INSIDE, *QUICK, "trainer.total_training_steps=12"]
    workspace.ok(*job, *workspace.hold_at(2, PACKAGES))
    workspace.wait_for_step("inside", 2)
    workspace.ok("stop", "inside")
    assert workspace.hpc_rl("logs", "-f", "inside").returncode == 75, workspace.logs()
    run = workspace.folder / "runs" / "inside"
    assert list((run / "checkpoints").glob("step-*"))
    assert workspace.status("inside")["state"] == "STOPPED"
    workspace.ok(*job, PYTHONPATH, "--wait")
    assert (workspace.status("inside")["state"], sorted(workspace.losses("inside"))) == ("COMPLETED", [*range(1, 13)])
    assert (run / "model" / "config.json").is_file()
    script = (run / "attempt-1" / "container.sh").read_text()
    assert f"image={workspace.folder}/hpc-rl.sif" in script
    assert not any("hf_not_to_be_seen" in path.read_text(errors="replace") for path in run.glob("*") if path.is_file())


@pytest.mark.long
def test_ray_and_ppo_in_an_image(workspace: Workspace) -> None:
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "64", "--val", "8")
    job = ["submit", "ppo", "--job-name", "ray", *INSIDE, PYTHONPATH, *SUMS, "trainer.total_training_steps=2"]
    workspace.ok(*job, "--wait")
    status = workspace.status("ray")
    assert (status["state"], status["step"]) == ("COMPLETED", 2)
    assert (workspace.folder / "runs" / "ray" / "model" / "config.json").is_file()


@pytest.mark.long
def test_no_unpacked_image_stays(workspace: Workspace, slurm_cluster: Cluster) -> None:
    nodes = ("node1", "node2")
    job = ["submit", "sft", *INSIDE, "container.unpack=always", "--sbatch", "nodelist=node[1-2]", *QUICK]

    def unpacked() -> list[str]:
        find = ["find", "/tmp", "-maxdepth", "1", "-name", f"{os.getuid()}.*.image.*"]
        return [path for node in nodes for path in slurm_cluster.exec_on(node, find, check=True).stdout.split()]

    def start(name: str) -> str:
        workspace.ok(*job, "--job-name", name, *workspace.hold_at(2, PACKAGES))
        workspace.wait_for_step(name, 2)
        assert len(unpacked()) == 2
        return str(workspace.status(name)["job_id"])

    def send(signal: str, pattern: str, *to: str) -> None:
        for node in to:
            slurm_cluster.exec_on(node, ["pkill", f"-{signal}", "-f", "--", pattern], check=True)

    killed = start("killed")
    send("KILL", "runs/killed/attempt-1/container.sh", "node2")
    assert slurm_cluster.wait_job(killed) == "FAILED"
    assert unpacked() == []  # the job's script has removed it
    with_script = start("with-script")
    send("STOP", "/slurm_script", "node1")  # otherwise it removes the image, or Slurm ends the tasks, which remove it
    send("KILL", "runs/with-script/attempt-1/container.sh", *nodes)
    send("KILL", "/slurm_script", "node1")
    slurm_cluster.wait_job(with_script)
    slurm_cluster.wait_idle()
    assert len(unpacked()) == 2
    workspace.ok(*job, "--job-name", "next", PYTHONPATH, "trainer.total_training_steps=1", "--wait")
    assert unpacked() == []
