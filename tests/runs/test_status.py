from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

from hpc_rl.cli.text import status_text
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir, terminated_file
from hpc_rl.runs import control, status
from hpc_rl.runs.finding import find_run
from hpc_rl.runs.folders import remember
from hpc_rl.runs.status import RunStatus, current_job, lost_nodes, process_start_time, status_of, statuses_of
from hpc_rl.slurm import commands
from tests.fake_slurm import fake_slurm
from tests.helpers import hpc_rl


@pytest.mark.parametrize(("start", "shown"), [("2030-01-02T03:04:05", True), ("N/A", False)])
def test_a_pending_run_shows_when_slurm_expects_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, shown: bool
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue.text").write_text(f"7 |PENDING |  |Priority |{start} |\n")
    run = RunDir(tmp_path / "sft-1")
    run.path.mkdir()
    run.job.write_text(json.dumps({"job_id": "7"}))
    now = status_of(run)
    assert (now.state, now.reason) == ("PENDING", "Priority")
    assert ("expected start  2030-01-02 03:04:05" in status_text(now)) == shown
    assert json.loads(now.as_json())["expected_start"] == (start if shown else "")


def test_the_job_that_holds_the_lock_counts_not_the_one_submitted_last(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_status("12", 1, "RUNNING", None)
    run.job.write_text(json.dumps({"job_id": "13"}))
    run.lock.write_text("11\n12\n")
    assert current_job(run) == "13"
    with run.lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert current_job(run) == "12"
        run.write_status("12", 1, "COMPLETED", 0)  # another one has just taken the lock, and not written its id yet
        run.job.write_text(json.dumps({"job_id": "13"}))
        assert current_job(run) == "13"


def test_a_run_that_was_started_by_hand_is_running_while_it_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_output", pytest.fail)  # Slurm has no such job
    run = RunDir(tmp_path / "by-hand")
    run.path.mkdir()
    run.config.write_text("a: 1\n")
    for earlier in ({}, {"job_id": "local-1", "host": os.uname().nodename, "pid": 1, "start_time": 1}):
        if earlier:
            run.job.write_text(json.dumps(earlier))
            run.write_status("local-1", 1, "COMPLETED", 0)
        before = status_of(run).state
        with run.take_lock("local-2"):
            now = status_of(run)
            assert (now.state, now.job_id, now.active) == ("RUNNING", "local-2", True)
            assert statuses_of([run])[0].state == "RUNNING"
            with pytest.raises(UserError, match=r"by-hand was started without a job: .* \(hpc-rl stop by-hand\)"):
                control.cancel(run)
            assert "will save as soon as it can" in control.stop(run) and run.stop.exists()
        assert status_of(run).state == before
    assert before == "COMPLETED"


def test_looking_at_the_lock_leaves_it_free(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.holder() is None
    run.lock.write_text("12\n")
    assert run.holder() is None
    with run.lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


class SilentSlurm:
    """Clients of a controller that is down: each waits until it is ended. The clock is the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorded: str = "") -> None:
        self.now, self.asked, self._recorded = 0.0, list[str](), recorded
        monkeypatch.setattr(commands, "time", self)
        monkeypatch.setattr(commands.subprocess, "run", self.run)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, argv: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        self.asked.append(argv[0])
        if argv[0] == "sacct" and self._recorded:
            return subprocess.CompletedProcess(argv, 0, self._recorded, "")
        self.now += timeout
        raise subprocess.TimeoutExpired(argv, timeout)


@pytest.fixture
def running(tmp_path: Path) -> RunDir:
    """A run whose job has recorded that it runs."""
    run = RunDir(tmp_path / "sft-1")
    run.path.mkdir()
    run.job.write_text(json.dumps({"job_id": "7"}))
    run.write_status("7", 1, "RUNNING", None)
    return run


@pytest.mark.parametrize("recorded", ["", "7|RUNNING|0:0|node1|None\n", "7|COMPLETED|0:0|node1|None\n"])
def test_without_a_controller_the_last_recorded_state_is_shown_soon(
    running: RunDir, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    slurm = SilentSlurm(monkeypatch, recorded)
    now = status_of(running)
    assert slurm.now <= 9
    assert (now.state, now.is_last_recorded, now.active) == ("RUNNING", True, True)
    shown = status_text(now)
    assert "state  RUNNING (Slurm does not answer: s" in shown and "; this is the last recorded state, of 20" in shown
    assert [one.state for one in statuses_of([running])] == ["RUNNING"]
    slurm.asked.clear()
    slurm.now = 0
    with pytest.raises(UserError, match=r"job 7 of run sft-1 is not cancelled: .*; try again .*: hpc-rl stop sft-1"):
        control.cancel(running)
    assert "scancel" not in slurm.asked and slurm.now <= 9
    assert "will save as soon as it can" in control.stop(running) and running.stop.exists()


@pytest.mark.parametrize("states", ["", "7|RUNNING|0:0|node1|None\n"])
def test_cancelling_ends_soon_if_only_scancel_gets_no_answer(
    running: RunDir, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    slurm = SilentSlurm(monkeypatch, states)

    def run(argv: list[str], timeout: float, **settings: object) -> subprocess.CompletedProcess[str]:
        if argv[0] == "squeue":
            slurm.now += 1
            return subprocess.CompletedProcess(argv, 0, "7 |RUNNING |node1 |None |N/A |\n", "")
        return slurm.run(argv, timeout, **settings)

    monkeypatch.setattr(commands.subprocess, "run", run)
    with pytest.raises(UserError, match="scancel took longer than 5 s, so job 7 may or may not be cancelled"):
        control.cancel(running)
    assert slurm.asked[-1] == "scancel" and slurm.now <= 10


def test_a_job_that_has_recorded_nothing_is_unknown_without_a_controller(
    running: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.status.unlink()
    SilentSlurm(monkeypatch)
    now = status_of(running)
    assert (now.state, now.is_last_recorded, now.active) == ("UNKNOWN", True, True)
    assert now.reason.endswith("the job has not recorded a state yet")


def test_a_silent_database_leaves_the_controller_time_to_answer(
    running: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = SilentSlurm(monkeypatch)

    def run(argv: list[str], timeout: float, **settings: object) -> subprocess.CompletedProcess[str]:
        if argv[0] == "squeue":
            return subprocess.CompletedProcess(argv, 0, "7 |RUNNING |node1 |None |N/A |\n", "")
        return slurm.run(argv, timeout, **settings)

    monkeypatch.setattr(commands.subprocess, "run", run)
    now = status_of(running)
    assert (now.state, now.nodes, now.is_last_recorded) == ("RUNNING", "node1", False)
    assert slurm.asked == ["sacct"]


def test_a_silent_database_is_not_taken_for_a_lost_job(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller forgets a job minutes after its end; then only the database knows how it ended."""
    slurm = SilentSlurm(monkeypatch)

    def run(argv: list[str], timeout: float, **settings: object) -> subprocess.CompletedProcess[str]:
        if argv[0] == "sacct":
            return slurm.run(argv, timeout, **settings)
        forgotten = "slurm_load_jobs error: Invalid job id specified"
        return subprocess.CompletedProcess(argv, 1, "", forgotten)

    monkeypatch.setattr(commands.subprocess, "run", run)
    for now in (status_of(running), *statuses_of([running])):
        assert (now.state, now.is_last_recorded) == ("RUNNING", True)


@pytest.mark.parametrize("answers", [False, True])
def test_the_table_states_that_slurm_does_not_answer(
    running: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    if answers:
        (programs / "squeue.text").write_text("7 |RUNNING |node1 |None |N/A |\n")
    else:
        (programs / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    done = hpc_rl("runs", str(running.path.parent), check=True)
    assert "RUNNING" in done.stdout and ("Slurm does not answer" in done.stderr) != answers


@pytest.mark.parametrize(("state", "shown"), [("RUNNING", "3 of 9, 2:05 ago"), ("COMPLETED", "3 of 9")])
def test_the_age_of_the_last_step_of_a_running_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, shown: str
) -> None:
    fake_slurm(tmp_path, monkeypatch)
    run = RunDir(tmp_path / "sft-1")
    run.path.mkdir()
    run.job.write_text(json.dumps({"job_id": "local-7", "pid": os.getpid(), "host": os.uname().nodename}
                                  | {"start_time": process_start_time(os.getpid())}))  # fmt: skip
    run.write_status("local-7", 1, state, None if state == "RUNNING" else 0)
    run.metrics.write_text('{"step": 3, "total_steps": 9}\n')
    os.utime(run.metrics, (1_000, 1_000))
    monkeypatch.setattr("hpc_rl.runs.status.time.time", lambda: 1_125.0)
    now = status_of(run)
    assert now.state == state and now.step_age_s == (125 if state == "RUNNING" else None)
    assert f"{shown}\n" in status_text(now) + "\n"


def test_the_numbers_of_the_last_step_are_those_of_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path, monkeypatch)
    run = RunDir(tmp_path / "sft-1")
    run.path.mkdir()
    lines: list[dict[str, float]] = [
        {"step": 2, "old": 1},
        {"step": 3, "train/loss": 2.0, "perf/eta_s": 9},
        {"step": 3, "perf/eta_s": 8},
    ]
    run.metrics.write_text("".join(json.dumps({**line, "total_steps": 9}) + "\n" for line in lines) + '{"step": 4')
    now = status_of(run)
    assert (now.step, now.metrics) == (3, {"train/loss": 2.0, "perf/eta_s": 8})


@pytest.mark.parametrize(
    ("noted", "state", "code"),
    [("CANCELLED", "CANCELLED", 143), ("TIMEOUT", "TIMEOUT", 143), (None, "FAILED", 1)],
)
def test_a_job_that_slurm_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str | None, state: str, code: int
) -> None:
    """The job was killed before its script could record how it ended."""
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue.text").write_text("")
    run = RunDir(tmp_path / "sft-1")
    (run.path / "attempt-2").mkdir(parents=True)
    run.write_status("7", 2, "RUNNING", None)
    if noted:
        terminated_file(run.path / "attempt-2").write_text(f"{noted}\n")
    now = status_of(run)
    assert (now.state, now.exit_code) == (state, code)


@pytest.mark.parametrize(
    ("recorded", "ended", "says_so"),
    [("RUNNING", "0:9", True), ("RUNNING", "137:0", True), ("RUNNING", "1:0", False), ("FAILED", "0:9", False)],
)
def test_a_killed_job_script_is_named(
    running: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str, ended: str, says_so: bool
) -> None:
    """It has recorded that it was running, and Slurm has it as failed by a signal."""
    running.write_status("7", 1, recorded, None if recorded == "RUNNING" else 1)
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sacct").write_text(f"#!/bin/sh\necho '7|FAILED|{ended}|node1|None'\n")
    now = status_of(running)
    assert now.state == "FAILED"
    assert ("the job's script was killed before it could record" in status_text(now)) is says_so


@pytest.mark.parametrize(
    ("recorded", "slurm", "may_return"),
    [
        ("REQUEUED", "NODE_FAIL", True),
        ("REQUEUED", "FAILED", True),
        ("REQUEUED", None, True),
        ("REQUEUED", "CANCELLED", False),
        ("REQUEUED", "PENDING", False),
        ("RUNNING", "NODE_FAIL", False),
        ("RUNNING", None, False),
        ("FAILED", "FAILED", False),
    ],
)
def test_a_job_that_has_queued_itself_again_may_return(
    running: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str, slurm: str | None, may_return: bool
) -> None:
    running.write_status("7", 1, recorded, 1)
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue.text").write_text(f"7 |{slurm} |node1 |None |N/A |\n" if slurm else "")
    for now in (status_of(running), *statuses_of([running])):
        assert (now.state, now.may_return) == (slurm or "FAILED", may_return)
        assert now.active == (slurm == "PENDING")
        assert ("queued again" in now.reason) == (may_return and slurm is not None)


def test_a_controller_that_fails_does_not_end_a_job_that_accounting_shows_as_ended(
    running: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accounting records an end before Slurm queues the job again."""
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sacct").write_text("#!/bin/sh\necho '7|NODE_FAIL|1:0|node1|None'\n")
    assert status_of(running).state == "NODE_FAIL", "the controller has no record of the job"
    (programs / "squeue").write_text("#!/bin/sh\necho 'Socket timed out on send/recv operation' >&2\nexit 1\n")
    for now in (status_of(running), *statuses_of([running])):
        assert (now.state, now.is_last_recorded) == ("RUNNING", True)


def test_lost_nodes_are_those_of_this_job(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert lost_nodes(run, "7") == ()
    run.losses.write_text("6 1 node1\n7 2 node2,node3\n7 3 node4\n7 4")
    assert lost_nodes(run, "7") == ("node2,node3", "node4")
    assert lost_nodes(run, None) == ()
    text = status_text(RunStatus("x", "x", "7", "PENDING", lost_nodes=("node2",)))
    assert "lost nodes  node2" in text


def test_many_runs_on_one_file_system_are_one_question_about_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def problem(path: Path) -> str:
        asked.append(path)
        return "full"

    monkeypatch.setattr(status, "disk_problem", problem)
    runs = [RunDir(tmp_path / name) for name in ("a", "b", "not there yet")]
    for run in runs[:2]:
        run.path.mkdir()
    assert [found.disk for found in statuses_of(runs)] == ["full"] * 3
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("recorded", "by_this_user", "state", "reason", "code"),
    [
        ("7|CANCELLED by 54321|0:0|None assigned|None", False, "CANCELLED", "by the user with the id 54321", None),
        (f"7|CANCELLED by {os.getuid()}|0:15|node1|None", False, "CANCELLED", "by you", 143),
        ("7|CANCELLED|0:0|node1|None", True, "CANCELLED", "by you", None),
        ("7|CANCELLED|0:0|node1|None", False, "CANCELLED", "by you or an administrator", None),
        ("7|CANCELLED|0:0|None assigned|BeginTime", True, "CANCELLED", "by you", None),
        ("7|CANCELLED by 0|0:0||DependencyNeverSatisfied", False, "CANCELLED", "DependencyNeverSatisfied", None),
        ("7|TIMEOUT|0:0|node1|None", False, "TIMEOUT", "", None),
        ("7|COMPLETED|0:0|node1|None", False, "COMPLETED", "", 0),
    ],
)
def test_a_job_that_slurm_ended_has_no_exit_code_0(
    running: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: str,
    by_this_user: bool,
    state: str,
    reason: str,
    code: int | None,
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sacct").write_text(f"#!/bin/sh\necho '{recorded}'\n")
    if by_this_user:
        control.cancel_jobs([RunStatus("x", str(running.path), "7", "RUNNING")])
    now = status_of(running)
    assert (now.state, now.reason, now.exit_code) == (state, reason, code)


def test_a_run_is_found_by_the_id_of_any_of_its_jobs_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = RunDir(tmp_path / "project" / "runs" / "sft-1")
    run.path.mkdir(parents=True)
    run.job.write_text(json.dumps({"job_id": "9"}))
    (run.path / "job-7.log").touch()
    remember(run.path.parent)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert find_run("9") == find_run("7") == run
    with pytest.raises(UserError, match="Slurm has no record of it: without accounting, Slurm forgets"):
        find_run("8")
    (tmp_path / "slurm" / "sacct").write_text("#!/bin/sh\necho '8|TIMEOUT|0:0|node1|None'\n")
    with pytest.raises(UserError, match="in Slurm's accounting it is TIMEOUT, without the path of its log"):
        find_run("8")


def test_a_stopped_run_names_what_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def text(state: str, job_id: str, path: str = "runs/sft-1") -> str:
        run = RunDir(tmp_path / path)
        run.path.mkdir(exist_ok=True, parents=True)
        run.job.write_text(json.dumps({"job_id": job_id}))
        return status_text(RunStatus(run.name, str(run.path), job_id, state))

    assert "to resume  hpc-rl requeue sft-1" in text("STOPPED", "7")
    assert "to resume  the same command with --job-name sft-1" in text("STOPPED", "local-7")
    assert "to resume  hpc-rl requeue many_1" in text("STOPPED", "7", "runs/many/many_1")
    for path in ("runs/folder/sft-1", "elsewhere/sft-1"):
        assert f"to resume  hpc-rl requeue {tmp_path}/{path}" in text("STOPPED", "7", path)
    for path in ("runs/many/many_1", "elsewhere/sft-1"):
        option = f"--run-dir {tmp_path}/{path}"
        assert f"to resume  the same command with {option}" in text("STOPPED", "local-7", path)
    assert "to resume" not in text("RUNNING", "7") + text("COMPLETED", "7")
    inside_a_shell = tmp_path / "runs" / "sft-1"  # it ran in the allocation around a shell
    (inside_a_shell / "job.json").write_text('{"job_id": "7", "pid": 1}')
    inside = status_text(RunStatus("sft-1", str(inside_a_shell), "7", "STOPPED"))
    assert "to resume  the same command with --job-name sft-1" in inside
