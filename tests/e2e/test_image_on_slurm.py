"""Training inside a real image on a real Slurm: saved by a stop, gone on with, and exported."""

import shutil
import sys
import uuid
from pathlib import Path

import pytest

from tests.e2e.test_real_image import OPTIONS
from tests.e2e.workspace import QUICK, make_workspace
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox


def test_a_run_in_an_image_is_stopped_and_goes_on(
    slurm_cluster: Cluster, built_image: Path, apptainer_environ: dict[str, str]
) -> None:
    environ = {**slurm_cluster.env, "PATH": apptainer_environ["PATH"], "HF_TOKEN": "hf_not_to_be_seen"}
    workspace = make_workspace(slurm_cluster.shared / f"image-{uuid.uuid4().hex[:8]}", environ)
    shutil.copy(built_image, workspace.folder / "hpc-rl.sif")
    packages = next(path for path in sys.path if path.endswith("-packages"))
    job = ["submit", "sft", "--nodes", "2", "--image", "hpc-rl.sif", "--job-name", "inside", *QUICK]
    job += [
        f"container.binds=[{packages}]",
        f"slurm.env.PYTHONPATH={packages}",
        f"container.options=[{','.join(OPTIONS)}]",
    ]
    job += ["trainer.total_training_steps=12"]
    workspace.ok(*job)
    workspace.wait_for_step("inside", 2)
    workspace.ok("stop", "inside")
    assert workspace.hpc_rl("logs", "-f", "inside").returncode == 75, workspace.logs()
    run = workspace.folder / "runs" / "inside"
    assert list((run / "checkpoints").glob("step-*"))
    assert workspace.status("inside")["state"] == "STOPPED"
    workspace.ok(*job, "--wait")
    assert (workspace.status("inside")["state"], sorted(workspace.losses("inside"))) == ("COMPLETED", [*range(1, 13)])
    assert (run / "model" / "config.json").is_file()
    script = (run / "attempt-1" / "container.sh").read_text()
    assert f"image={workspace.folder}/hpc-rl.sif" in script
    assert not any("hf_not_to_be_seen" in path.read_text(errors="replace") for path in run.glob("*") if path.is_file())
