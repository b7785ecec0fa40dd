"""Which stages of a pipeline `requeue` queues again, after which jobs, and which it removes from the queue."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.runs.run_sets import PipelineDir
from hpc_rl.runs.status import current_job
from hpc_rl.submission import queue
from hpc_rl.submission.requeue import requeue
from hpc_rl.system.files import read_json
from tests.fake_slurm import calls, fake_slurm


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's programs; sbatch answers with the ids 71, 72, 73."""
    monkeypatch.chdir(tmp_path)
    programs = fake_slurm(tmp_path, monkeypatch)
    sbatch = programs / "sbatch"
    sbatch.write_text(
        f'#!/bin/bash\necho "sbatch $*" >> {programs}/calls\n'
        f'echo Submitted batch job $((70 + $(grep --count "^sbatch" {programs}/calls)))\n'
    )
    return programs


def pipeline(folder: Path, slurm: Path, *states: str, **first_job: Any) -> PipelineDir:
    """A pipeline with a stage in each of these states: jobs 1, 2, 3 and so on."""
    found = PipelineDir(folder / "runs" / "loop")
    found.path.mkdir(parents=True)
    stages = [{"round": str(number), "stage": "a"} for number, _ in enumerate(states, 1)]
    found.record.write_text(json.dumps({"stages": stages}))
    queued = []
    for number, (run, state) in enumerate(zip(found.runs(), states, strict=True), 1):
        run.path.mkdir()
        run.script.write_text("srun true\n")
        job = {"job_id": str(number), "working_dir": str(folder), **(first_job if number == 1 else {})}
        run.job.write_text(json.dumps(job))
        if state in ("PENDING", "RUNNING"):
            queued.append(f"{number}|{state}||None|")
        else:
            has_started = state != "CANCELLED"
            run.write_status(str(number), int(has_started), state, 1 if has_started else None)
    (slurm / "squeue.text").write_text("\n".join(queued) + "\n")
    return found


def submitted(folder: Path) -> list[str]:
    """What each new job depends on."""
    found = [call.split() for call in calls(folder) if call.startswith("sbatch ")]
    return [next((word.rpartition("=")[2] for word in words if "dependency" in word), "") for words in found]


def jobs(several: PipelineDir) -> list[str]:
    return [read_json(run.job)["job_id"] for run in several.runs()]


def test_stages_that_still_wait_for_the_failed_one_are_queued_anew(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "COMPLETED", "FAILED", "PENDING", "CANCELLED")
    assert requeue(several) == "submitted jobs 71 to 73: 3 of 4 stages of pipeline loop, from loop_2-a on"
    assert submitted(tmp_path) == ["", "afterok:71", "afterok:72"]
    assert jobs(several) == ["1", "71", "72", "73"]
    assert "scancel 3" in calls(tmp_path)
    assert [current_job(run) for run in several.runs()] == jobs(several)


def test_a_stage_that_runs_is_waited_for(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "COMPLETED", "RUNNING", "CANCELLED")
    requeue(several)
    assert submitted(tmp_path) == ["afterok:2"] and jobs(several) == ["1", "2", "71"]
    assert not any(call.startswith("scancel") for call in calls(tmp_path))


def test_a_stage_that_stops_is_not_waited_for(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "RUNNING", "CANCELLED")
    stop = several.runs()[0].stop
    stop.write_text("user\n")
    with pytest.raises(UserError, match="stage loop_1-a was asked to stop and has not ended yet"):
        requeue(several)
    assert submitted(tmp_path) == [] and stop.exists()


def test_a_stage_that_runs_before_its_turn_is_refused(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "RUNNING")
    with pytest.raises(UserError, match="stage loop_2-a is RUNNING, but loop_1-a before it did not complete"):
        requeue(several)
    assert submitted(tmp_path) == []


@pytest.mark.parametrize(("state", "after"), [("CANCELLED", "afterok:9"), ("FAILED", "")])
def test_the_first_stage_still_waits_for_its_job_if_it_never_started(
    tmp_path: Path, slurm: Path, state: str, after: str
) -> None:
    several = pipeline(tmp_path, slurm, state, "CANCELLED", after="9")
    (slurm / "squeue.text").write_text("9|RUNNING|node1|None|\n")
    requeue(several)
    assert submitted(tmp_path) == [after, "afterok:71"]


@pytest.mark.parametrize("is_local", [True, False])
def test_a_pipeline_that_ran_on_this_machine_is_not_queued(tmp_path: Path, slurm: Path, is_local: bool) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "CANCELLED", **({"pid": 1, "start_time": 0} if is_local else {}))
    if not is_local:  # the second stage never started
        (several.runs()[1].script).unlink()
    with pytest.raises(UserError, match=r"stage loop_\d-a was not queued by Slurm: run the command .*--job-name loop$"):
        requeue(several)
    assert submitted(tmp_path) == []


def test_a_refused_stage_leaves_those_that_wait(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "PENDING")
    sbatch = slurm / "sbatch"
    sbatch.write_text(sbatch.read_text() + f'[ $(grep --count "^sbatch" {slurm}/calls) -lt 2 ]\n')
    with pytest.raises(UserError):
        requeue(several)
    assert [call for call in calls(tmp_path) if call.startswith("scancel")] == ["scancel 71"]
    assert jobs(several) == ["1", "2"]


def test_the_advice_names_the_folder_of_the_stage(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "FAILED")
    run = several.runs()[0]
    run.script.chmod(0o666)
    with pytest.raises(UserError, match=f"with --run-dir {run.path}[ )]"):
        requeue(several)


def test_a_waiting_job_that_slurm_removes_meanwhile_is_no_error(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "PENDING")
    (slurm / "scancel").write_text(
        f'#!/bin/bash\necho "scancel $*" >> {slurm}/calls; echo > {slurm}/squeue.text; exit 1\n'
    )
    requeue(several)
    assert jobs(several) == ["71", "72"]
    assert [call for call in calls(tmp_path) if call.startswith("scancel")] == ["scancel 2"]


def test_a_waiting_job_that_cannot_be_cancelled_takes_the_new_jobs_back(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "PENDING")
    (slurm / "scancel").write_text(f'#!/bin/bash\necho "scancel $*" >> {slurm}/calls; [ $1 != 2 ]\n')
    with pytest.raises(UserError, match=r"^scancel 2: "):
        requeue(several)
    assert calls(tmp_path)[-1] == "scancel 71 72" and jobs(several) == ["1", "2"]


def test_the_first_error_is_shown_if_the_new_jobs_cannot_be_cancelled(tmp_path: Path, slurm: Path) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "PENDING")
    (slurm / "scancel").write_text("#!/bin/bash\nexit 1\n")
    said = r"(?s)^scancel 2: .*\njobs 71, 72 were queued .*: cancel them with scancel 71 72$"
    with pytest.raises(UserError, match=said):
        requeue(several)
    assert jobs(several) == ["71", "72"], "hpc-rl cancel finds them"


def test_each_new_job_is_recorded_before_the_next_is_queued(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = pipeline(tmp_path, slurm, "FAILED", "CANCELLED")
    seen: list[list[str]] = []
    real = queue.queue
    monkeypatch.setattr(queue, "queue", lambda *words: (seen.append(jobs(several)), real(*words))[1])
    monkeypatch.setattr(queue, "git_snapshot", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        requeue(several)
    assert seen == [["1", "2"], ["71", "2"]] and jobs(several) == ["71", "72"]
