import os
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.runs.run_sets import SweepDir
from hpc_rl.submission.request import JobRequest
from hpc_rl.submission.series import sweep as sweeps
from hpc_rl.submission.series.sweep import directives
from tests.fake_slurm import calls, fake_slurm
from tests.submission.script.test_render import GOLDEN, check_shell

PROGRAM = ("train.py", "--lr", "1e-4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def plan(*words: str, limit: int | None = None, **settings: Any) -> sweeps.PlannedSweep:
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return sweeps.plan(JobRequest("torchrun", words, PROGRAM, {"trainer.device": "cpu", **dotted}), limit)


def test_golden() -> None:
    planned = plan("slurm.env.LR=1e-4,3e-4", "slurm.env.SEED=1,2,3", slurm__time="24:00:00", slurm__partition="gpu")
    script = sweeps.array_script(SweepDir(Path("/scratch/my runs/100%")), "torchrun", planned.scripts, max_parallel=4)
    golden = GOLDEN / "sweep.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    check_shell(script)


def test_nothing_is_made_and_every_point_is_complete(folder: Path) -> None:
    planned = plan("slurm.env.LR=1e-4,3e-4", "slurm.env.SEED=1,2", limit=2)
    assert planned.sweep.name == "torchrun-sweep-1"
    assert "#SBATCH --array=1-4%2\n" in planned.script
    assert [job.run_dir.name for job in planned.jobs] == [f"torchrun-sweep-1_{number}" for number in (1, 2, 3, 4)]
    assert "export LR=3e-4\nexport SEED=1\n" in planned.scripts[2]
    assert "--job-name=torchrun-sweep-1_3\n" in planned.scripts[2]
    assert not (folder / "runs").exists()


def test_slurm_is_asked_once_for_all_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(folder, monkeypatch)
    plan("slurm.env.LR=1,2,3", slurm__time="1:00:00")
    assert [line.split()[0] for line in calls(folder)] == ["sinfo"]


def test_a_directive_that_the_cluster_refuses_is_in_no_script() -> None:
    planned = plan("slurm.env.LR=1,2", slurm__leave_out=["job-name"])
    assert not any("--job-name" in script for script in [planned.script, *planned.scripts])


def test_a_name_is_used_once(folder: Path) -> None:
    (folder / "runs" / "torchrun-sweep-1").mkdir(parents=True)
    assert plan("slurm.env.LR=1,2").sweep.name == "torchrun-sweep-2"
    (folder / "runs" / "lr").mkdir()
    with pytest.raises(UserError, match="runs/lr exists"):
        plan("slurm.env.LR=1,2", slurm__job_name="lr")


def test_an_array_asks_the_same_for_all() -> None:
    with pytest.raises(
        UserError, match=r"trainer\.nnodes=2 requests --nodes=2 from Slurm, but the first run requests --nodes=1"
    ):
        plan("trainer.nnodes=1,2")
    with pytest.raises(UserError, match="requests --mem=4G from Slurm, but the first run requests no such option"):
        plan("slurm.mem=null,4G")


def test_all_points_are_checked_each_problem_once() -> None:
    with pytest.raises(UserError, match="start_timeout_s"):
        plan("slurm.start_timeout_s=5,-1")
    Path("train.py").unlink()
    with pytest.raises(UserError) as error:
        plan("slurm.env.LR=1,2,3")
    assert str(error.value).count("no such file") == 1


def test_directives_end_at_the_first_command() -> None:
    assert directives("#!/bin/bash\n\n# a\n#SBATCH --mem=1G\nset -e\n#SBATCH --time=1\n") == ["#SBATCH --mem=1G"]
