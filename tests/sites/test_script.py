"""What a profile brings into the job script, as the script runs."""

import json
import os
from pathlib import Path

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.run_dir import RunDir
from hpc_rl.sites.profile import load_profile, shipped_names
from hpc_rl.submission.job import Job
from hpc_rl.submission.script import render
from tests.submission.test_script import check_shell, run_script, torchrun_job

GOLDEN = Path(__file__).parents[1] / "golden" / "site"
SHIPPED = shipped_names()


@pytest.mark.parametrize("name", SHIPPED)
def test_golden_script_of_a_shipped_profile(name: str) -> None:
    settings = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2, "slurm.python": "/opt/venv/bin/python"}
    config = compose("torchrun", [], settings, load_profile(name, environ={}).values)
    script = render(Job("torchrun", config, RunDir(Path("/scratch/me/runs/first")), Path("/home/me"), ("train.py",)))
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    check_shell(script)


def test_modules_are_loaded_before_the_setup_and_a_missing_one_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text('module() { echo "module $*"; [ "$2" != missing ]; }\n')
    job = torchrun_job(tmp_path / "run", **{"slurm.modules": ["cuda/12.4", "a b"], "slurm.setup": ["echo setup"]})
    with_home = f"export MODULESHOME={tmp_path}/modules\n"
    monkeypatch.setattr("tests.submission.test_script.render", lambda job: with_home + render(job))
    done, seen = run_script(job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["module load cuda/12.4", "module load a b", "setup"]
    assert seen["argv"][-1] == "train.py"
    (tmp_path / "seen.json").unlink()
    missing = torchrun_job(tmp_path / "run", **{"slurm.modules": ["missing"]})
    done, seen = run_script(missing, tmp_path)
    assert (done.returncode, seen) == (2, {})
    assert done.stderr.strip().endswith("cannot load the module missing (slurm.modules)")


@pytest.mark.parametrize("exits", [0, 3])
def test_the_epilogue_runs_however_the_job_ends_and_changes_nothing(tmp_path: Path, exits: int) -> None:
    lines = ["echo left with $code$not_set", "false"]
    job = torchrun_job(tmp_path / "run", **{"slurm.epilogue": lines})
    done, _ = run_script(job, tmp_path, exits=exits)
    assert done.returncode == exits
    assert done.stdout.count(f"left with {exits}\n") == 1
    assert json.loads(job.run_dir.status.read_text())["exit_code"] == exits


def test_the_epilogue_runs_before_a_requeue(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run", **{"slurm.epilogue": ["echo left with $code"]})
    done, _ = run_script(job, tmp_path, step='echo walltime > "$HPC_RL_RUN_DIR/stop"; exit 75')
    assert done.returncode == 75
    assert done.stdout.splitlines() == ["hpc-rl: saved before the walltime; job 7 is queued again", "left with 75"]
    assert json.loads(job.run_dir.status.read_text())["state"] == "REQUEUED"
