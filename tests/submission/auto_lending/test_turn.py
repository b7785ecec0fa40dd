"""The lender jobs that a run queues and cancels itself, with programs that stand in for Slurm's."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.cli.text import status_text
from hpc_rl.config.compose import compose, dump
from hpc_rl.errors import UserError
from hpc_rl.formats.auto_lending import AutoLending, order_file, read_auto_lending
from hpc_rl.formats.offer import LENT_ENVIRONMENTS, LentNode, write_lent_nodes
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import status_of
from hpc_rl.slurm import commands
from hpc_rl.submission.auto_lending.order import place_order, read_order
from hpc_rl.submission.auto_lending.turn import end_order, take_turn
from hpc_rl.submission.lending import lend_job
from tests.fake_slurm import calls, fake_slurm
from tests.helpers import hpc_rl
from tests.submission.test_lending import OPEN

COUNTED = 'echo $((100 + $(grep -c "^sbatch" "${0%/*}/calls"))); exit 0\n'
"""What sbatch prints: 101, 102 and so on."""
TAKES_BACK = 'sed -Ei "/^($(IFS="|"; echo "$*")) /s/PENDING/CANCELLED/" "${0%/*}/squeue.text"\n'
"""scancel --state=PENDING ends these jobs if they wait."""
LISTS_LOGS = """#!/bin/bash
case "$*" in *StdOut*) cat "$0.logs" || true;; *) cat "$0.text";; esac
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that trains."""
    monkeypatch.chdir(tmp_path)
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sbatch.fails").write_text(COUNTED)
    (programs / "scancel.fails").write_text(TAKES_BACK)
    (programs / "squeue").write_text(LISTS_LOGS)
    run = RunDir(tmp_path / "runs" / "math")
    (run.path / "attempt-1").mkdir(parents=True)
    run.job.write_text(json.dumps({"kind": "ppo", "job_id": "7", "working_dir": str(tmp_path)}))
    run.status.write_text(json.dumps({"job_id": "7", "attempt": 1, "state": "RUNNING", "exit_code": None}))
    run.config.write_text(dump(compose("ppo", [], OPEN)))
    shows(tmp_path)
    return run


def shows(folder: Path, **states: str) -> None:
    """Let squeue show the run and these jobs: `j101="PENDING"`."""
    jobs = {"7": "RUNNING", **{name[1:]: state for name, state in states.items()}}
    lines = [f"{job} |{state} |{'node1' if state == 'RUNNING' else ''} |None |N/A |" for job, state in jobs.items()]
    (folder / "slurm" / "squeue.text").write_text("\n".join(lines) + "\n")


def measured(run: RunDir, step: int, share: float) -> None:
    """Record the newest step."""
    record = {"step": step, "total_steps": 9, "time": 1.0, "perf/time_per_step": 10.0, "perf/engine_idle_s": 0.0}
    with run.metrics.open("a") as file:
        for line in (record, {"step": step, "total_steps": 9, "time": 1.0, "timing_s/gen": 10 * share}):
            file.write(json.dumps(line) + "\n")


def order(run: RunDir, most: int = 3, **settings: object) -> str:
    given = {"trainer.nnodes": 1, "slurm.partition": "idle", "lend.auto_at_a_time": 2, **settings}
    return place_order(run, lend_job(run, [], given, None, by_run=True), most)


def counts(found: AutoLending) -> tuple[int, int]:
    return found.waiting, found.running


def test_jobs_are_queued_while_engines_are_the_bottleneck_and_taken_back_then(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "will queue up to 3 lender jobs" in order(run) and order_file(run.path).stat().st_mode & 0o077 == 0
    assert counts(take_turn(run)) == (0, 0)  # nothing was measured yet
    measured(run, 1, 0.8)
    assert counts(take_turn(run)) == (2, 0)
    assert (
        "queued math-lend-1, math-lend-2: the run spent 80% of its last steps waiting for engines"
        in capfd.readouterr().out
    )
    script = (tmp_path / "runs/math-lend-2/job.sbatch").read_text()
    assert "#SBATCH --partition=idle\n" in script and f"{run.path} &" in script and "dependency" not in script
    shows(tmp_path, j101="RUNNING", j102="PENDING")
    assert counts(take_turn(run)) == (2, 1)  # no more than 3
    text = status_text(status_of(run))
    assert "auto     2 lender jobs in the queue, 1 running, at most 3\n" in f"{text}\n"
    shows(tmp_path, j101="RUNNING", j102="PENDING", j103="PENDING")
    for step in (2, 3, 4):
        measured(run, step, 0.02)
    assert counts(take_turn(run)) == (0, 1)
    assert "scancel --state=PENDING 102 103" in calls(tmp_path)
    assert "removed 2 lender jobs from the queue: the run spent" in capfd.readouterr().out
    assert sorted(path.name for path in (tmp_path / "runs").glob("math-*")) == ["math-lend-1"]


def test_a_run_that_has_no_engine_waits_whatever_its_last_steps_were(run: RunDir) -> None:
    run.config.write_text(dump(compose("ppo", [], {**OPEN, "rollout.engines": "lent"})))
    order(run)
    measured(run, 1, 0.0)
    write_lent_nodes(run.path / "attempt-1", [LentNode("3", "gpu1", 1)])
    assert counts(take_turn(run)) == (0, 0)
    write_lent_nodes(run.path / "attempt-1", [LentNode("3", "gpu1", 0, 100)])
    assert counts(take_turn(run)) == (2, 0)


def test_a_refusal_of_sbatch_is_one_line_and_the_next_look_tries_again(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm" / "sbatch.fails").write_text("echo sbatch: error: QOSMaxSubmitJobPerUserLimit >&2; exit 1\n")
    order(run)
    measured(run, 1, 0.8)
    for _ in range(2):
        found = take_turn(run)
        assert "sbatch refused the job: QOSMaxSubmitJobPerUserLimit" in found.problem and found.waiting == 0
    assert len(capfd.readouterr().out.splitlines()) == 1
    assert "in the queue, 0 running, at most 3 (sbatch refused" in status_text(status_of(run))
    assert not list((tmp_path / "runs").glob("math-*"))
    (tmp_path / "slurm" / "sbatch.fails").write_text(COUNTED)
    found = take_turn(run)
    assert (found.problem, found.waiting) == ("", 2)


def test_without_sbatch_there_is_one_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    order(run)
    monkeypatch.setattr(commands, "available", lambda: False)  # in an image
    assert (
        take_turn(run).problem == "there is no sbatch on PATH here: put it there (slurm.setup), or use an image with it"
    )


def test_jobs_that_only_fail_are_not_queued_for_ever(run: RunDir, tmp_path: Path) -> None:
    order(run, most=4, **{"lend.auto_at_a_time": 4})
    measured(run, 1, 0.8)
    assert counts(take_turn(run)) == (4, 0)
    shows(tmp_path, j101="FAILED", j102="FAILED", j103="FAILED", j104="PENDING")
    found = take_turn(run)
    assert "because the last 3 have failed" in found.problem and "scancel --state=PENDING 104" in calls(tmp_path)
    assert counts(take_turn(run)) == (0, 0)
    assert {path.name[-1] for path in (tmp_path / "runs").glob("math-*")} == {"1", "2", "3"}  # what failed is kept
    order(run, most=1)
    assert counts(take_turn(run)) == (1, 0)


def test_at_its_end_a_run_takes_back_the_jobs_that_wait(run: RunDir, tmp_path: Path) -> None:
    order(run)
    measured(run, 1, 0.8)
    take_turn(run)
    shows(tmp_path, j101="RUNNING", j102="PENDING")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    turn = [sys.executable, "-P", "-m", "hpc_rl.submission.auto_lending.turn", str(run.path), "--last"]
    done = subprocess.run(turn, env=environ, capture_output=True, text=True, timeout=300, check=True)
    assert (
        "removed 1 lender job from the queue: the run ends" in done.stdout
        and "scancel --state=PENDING 102" in calls(tmp_path)
    )
    assert read_order(run) is not None  # for the next attempt


def test_an_order_ends_and_has_limits(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--auto 17: this site allows at most 16 lender jobs of a run"):
        order(run, most=17)
    with pytest.raises(UserError, match="--auto 2: a run queues only lender jobs with engines itself"):
        order(run, most=2, **{"lend.resource": LENT_ENVIRONMENTS})
    with pytest.raises(UserError, match="allows no lender jobs that a run queues itself"):
        order(run, most=1, **{"lend.auto_most": 0})
    with pytest.raises(UserError, match="run math queues no lender jobs itself: nothing to end"):
        end_order(run)
    order(run)
    measured(run, 1, 0.8)
    take_turn(run)
    assert "and cancels those that wait" in end_order(run)
    (tmp_path / "slurm" / "squeue.text").rename(tmp_path / "hidden")  # Slurm does not answer
    assert take_turn(run).waiting == 2
    text = status_text(status_of(run))
    assert "2 lender jobs still in the queue; no more will be queued (Slurm does not answer" in text
    shows(tmp_path, j101="PENDING", j102="PENDING")
    take_turn(run)
    assert "scancel --state=PENDING 101 102" in calls(tmp_path) and status_of(run).auto_lending is None
    order_file(run.path).write_text('{"config": {}, "number": []}')
    assert "is damaged" in take_turn(run).problem


def test_the_command_orders_and_ends(run: RunDir, tmp_path: Path) -> None:
    wrong = hpc_rl("lend", "math", "--auto", "2", "--count", "2")
    assert wrong.returncode == 2 and "remove one of the two" in wrong.stderr
    words = ("--partition", "idle", "--mem", "3G")
    assert "will queue up to 2 lender jobs" in hpc_rl("lend", "math", "--auto", "2", *words, check=True).stdout
    found = read_order(run)
    assert found is not None and found.config.slurm.mem == "3G" and not list((tmp_path / "runs").glob("math-*"))
    assert "0 lender jobs in the queue, 0 running, at most 2" in status_text(status_of(run))
    assert "queues no more" in hpc_rl("lend", "math", "--auto", "0", check=True).stdout
    assert read_auto_lending(run.path).most == 0


def test_after_the_end_of_an_order_jobs_that_wait_can_be_cancelled_again(run: RunDir, tmp_path: Path) -> None:
    order(run)
    measured(run, 1, 0.8)
    take_turn(run)
    order_file(run.path).unlink()
    shows(tmp_path, j7="COMPLETED", j101="PENDING", j102="PENDING")
    (tmp_path / "slurm" / "scancel.fails").write_text("echo scancel: error: no >&2; exit 1\n")
    assert (
        end_order(run).endswith(" jobs (scancel 101 102: scancel: error: no)") and read_auto_lending(run.path).waiting
    )
    (tmp_path / "slurm" / "scancel.fails").write_text(TAKES_BACK)
    assert end_order(run) == "run math queues no more lender jobs" and "101 102" in calls(tmp_path)[-3]
    with pytest.raises(UserError, match="nothing to end"):
        end_order(run)


def test_a_lender_that_starts_again_and_again_without_generating_is_cancelled(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order(run)
    measured(run, 1, 0.8)
    take_turn(run)
    shows(tmp_path, j101="RUNNING", j102="PENDING", j103="PENDING", j104="PENDING")
    for failures in (0, 0, 0, 1):
        RunDir(tmp_path / "runs/math-lend-1").next_attempt().mkdir()
        assert take_turn(run).failures == failures
    assert "cancelled math-lend-1, which has started 3 times and generated nothing" in capfd.readouterr().out
    assert RunDir(tmp_path / "runs/math-lend-1").cancelled.read_text() == "101\n"


@pytest.mark.parametrize(("state", "code"), [("RUNNING", 0), ("COMPLETED", 1)])
def test_a_lender_that_has_just_started_is_not_cancelled(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    order(run)
    measured(run, 1, 0.8)
    take_turn(run)
    shows(tmp_path, j101="PENDING", j102="PENDING")
    RunDir(tmp_path / "runs/math-lend-2").next_attempt().mkdir()  # it was queued again
    starts = f'sed -i "s/^101 |PENDING/101 |{state}/" "${{0%/*}}/squeue.text"\n{TAKES_BACK}exit {code}\n'
    (tmp_path / "slurm" / "scancel.fails").write_text(starts)
    for step in (2, 3, 4):
        measured(run, step, 0.02)
    found = take_turn(run)
    assert (found.waiting, found.running, found.problem) == (0, 1 - code, "")
    started, waited = (RunDir(tmp_path / "runs" / name) for name in ("math-lend-1", "math-lend-2"))
    assert started.read_status() == {} and not started.cancelled.exists()
    assert waited.read_status()["state"] == "CANCELLED" and waited.cancelled.read_text() == "102\n"
    assert "removed 1 lender job from the queue" in capfd.readouterr().out


UNCLEAR = "echo sbatch: error: Socket timed out on send/recv operation >&2; exit 1\n"


def kills_the_look(run: RunDir, folder: Path) -> None:
    """Let a process queue jobs, and be killed as soon as it calls sbatch."""
    (folder / "slurm" / "sbatch.fails").write_text('kill -KILL $(cat "${0%/*}/look"); exit 1\n')
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    words = ["-P", "-m", "hpc_rl.submission.auto_lending.turn", str(run.path)]
    exec_look = ["bash", "-c", f'echo $$ > {folder}/slurm/look; exec "$@"', "look", sys.executable, *words]
    assert subprocess.run(exec_look, env=environ, timeout=300, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("how", ["unclear", "killed"])
def test_a_job_without_a_clear_answer_is_found_by_its_log(run: RunDir, tmp_path: Path, how: str) -> None:
    order(run)
    measured(run, 1, 0.8)
    if how == "killed":
        kills_the_look(run, tmp_path)
    else:
        (tmp_path / "slurm" / "sbatch.fails").write_text(UNCLEAR)
        assert "sbatch did not state whether" in take_turn(run).problem
    (tmp_path / "slurm" / "sbatch.fails").write_text(COUNTED)
    lender = RunDir(tmp_path / "runs/math-lend-1")
    assert read_auto_lending(run.path).waiting == 1 and lender.path.exists()
    order(run, most=1)
    assert counts(take_turn(run)) == (1, 0) and lender.path.exists()  # Slurm may still get it
    others = f"CLUSTER: a\n9 |{tmp_path}/other/math-lend-1/job-%j.log |\n"
    (tmp_path / "slurm" / "squeue.logs").write_text(f"{others}55 |{lender.path}/job-%j.log   |\n")
    shows(tmp_path, j55="PENDING")
    assert counts(take_turn(run)) == (1, 0) and lender.read_job()["job_id"] == "55"
    order_file(run.path).unlink()
    assert counts(take_turn(run)) == (0, 0) and "scancel --state=PENDING 55" in calls(tmp_path)
    assert not lender.path.exists()


def test_a_job_that_never_appears_is_forgotten_in_the_end(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "slurm" / "sbatch.fails").write_text(UNCLEAR)
    order(run, most=1)
    measured(run, 1, 0.8)
    take_turn(run)
    order_file(run.path).unlink()
    assert counts(take_turn(run)) == (1, 0) and not any("scancel" in call for call in calls(tmp_path))
    script = tmp_path / "runs/math-lend-1/job.sbatch"
    os.utime(script, (1, 1))
    (tmp_path / "slurm" / "squeue.text").rename(tmp_path / "hidden")
    (tmp_path / "slurm" / "squeue").write_text("#!/bin/bash\nexit 1\n")
    found = take_turn(run)
    assert "Slurm does not answer" in found.problem and found.waiting == 1 and script.exists()
    (tmp_path / "slurm" / "squeue").write_text(LISTS_LOGS)
    assert counts(take_turn(run)) == (0, 0) and not script.parent.exists()


def ends(run: RunDir, folder: Path, state: str, tokens: int = 0) -> AutoLending:
    """Queue one job and let it end."""
    take_turn(run)
    job = 100 + sum(call.startswith("sbatch") for call in calls(folder))
    write_lent_nodes(run.path / "attempt-1", [LentNode(str(job), "gpu1", 0, tokens)] if tokens else [])
    shows(folder, **{f"j{job}": state})
    order(run, most=0)  # none instead of it
    number = read_auto_lending(run.path).order
    record = json.loads(order_file(run.path).read_text()) | {"number": number}
    order_file(run.path).write_text(json.dumps(record))
    found = take_turn(run)
    order_file(run.path).write_text(json.dumps(record | {"most": 1}))
    return found


def test_every_end_counts_as_a_failure_unless_somebody_has_ended_the_job(run: RunDir, tmp_path: Path) -> None:
    order(run, most=1)
    measured(run, 1, 0.8)
    states = ["OUT_OF_MEMORY", "CANCELLED", "NODE_FAIL", "PREEMPTED"]
    assert [ends(run, tmp_path, state).failures for state in states] == [1, 1, 2, 2]
    for at in (1, 3):
        RunDir(tmp_path / "runs" / f"math-lend-{at}").next_attempt().mkdir()  # that it has started says nothing
    assert ends(run, tmp_path, "TIMEOUT", tokens=5).failures == 0
    assert ends(run, tmp_path, "BOOT_FAIL").failures == 1
    assert ends(run, tmp_path, "COMPLETED").failures == 0
    assert [ends(run, tmp_path, "TIMEOUT").failures for _ in range(3)] == [1, 2, 3]
    assert "because the last 3 have failed" in take_turn(run).problem
