import pytest

from hpc_rl.slurm.states import (
    NEVER,
    NOT_STARTED,
    JobState,
    exit_code_of,
    never_starts,
    newer,
    read_sacct,
    read_scontrol,
    read_squeue,
    run_dir_of_script,
    sacct_states,
    squeue_states,
)

SCONTROL = (
    "JobId=7 JobName=my run UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901757 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:00:01 NodeList={nodes} BatchHost=node1 NumNodes=2 Command=/a/job.sbatch "
    "WorkDir=/a StdErr=/a/b c/job-7.log StdIn=/dev/null StdOut=/a/b c/job-7.log Power="
)


def test_sacct_takes_the_last_line_of_the_job() -> None:
    text = "7|REQUEUED|0:0|node1|None\n7|CANCELLED by 0|0:15|node[1-2]|None\n77|COMPLETED|0:0|node1|None\n"
    assert read_sacct(text, "7") == JobState("CANCELLED", "node[1-2]", "", 143, cancelled_by=0)
    assert read_sacct(text, "8") is None
    assert read_sacct("", "7") is None


def test_squeue_tells_why_a_job_waits() -> None:
    text = "7                   |PENDING             |                    |Resources           |\n"
    state = read_squeue(text, "7")
    assert state == JobState("PENDING", "", "Resources", None)
    assert not state.ended


def test_tasks_of_an_array_that_never_started_share_a_line() -> None:
    text = "1_1|CANCELLED by 0|0:0|node1|None\n1_[2-3,5%1]|CANCELLED by 0|0:0|None assigned|JobArrayTaskLimit\n"
    found = sacct_states(text)
    assert list(found) == ["1_1", "1_2", "1_3", "1_5"]
    assert found["1_5"] == JobState("CANCELLED", "", "JobArrayTaskLimit", 0, cancelled_by=0)


@pytest.mark.parametrize(
    ("state", "start", "expected"),
    [
        ("PENDING", "2030-01-02T03:04:05", "2030-01-02T03:04:05"),
        ("PENDING", "N/A", ""),
        ("RUNNING", "2030-01-02T03:04:05", ""),
    ],
)
def test_squeue_estimates_the_start_of_a_pending_job(state: str, start: str, expected: str) -> None:
    found = read_squeue(f"7 |{state} |  |Priority |{start} |\n", "7")
    assert found is not None and found.expected_start == expected


def test_squeue_tells_of_many_jobs() -> None:
    text = "1_2 |PENDING |  |JobArrayTaskLimit |\n1_1 |RUNNING |node1 |None |\n"
    found = squeue_states(text)
    assert found == {"1_2": JobState("PENDING", "", "JobArrayTaskLimit"), "1_1": JobState("RUNNING", "node1")}


def test_the_controller_is_newer_than_accounting_which_knows_the_end() -> None:
    ended, queued, forgotten = JobState("FAILED", "node1", "", 3), JobState("PENDING"), JobState("FAILED", "node1")
    assert newer(ended, queued) is queued
    assert newer(ended, forgotten) is ended
    assert newer(ended, None) is ended
    assert newer(JobState("RUNNING"), None) == JobState("RUNNING")
    assert newer(None, None) is None


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("COMPLETED", "0:0", 0), ("FAILED", "75:0", 75), ("CANCELLED", "0:15", 143), ("RUNNING", "0:0", None)],
)
def test_scontrol_has_state_exit_code_and_log(state: str, code: str, expected: int | None) -> None:
    text = SCONTROL.format(state=state, reason="None", code=code, nodes="node[1-2]")
    assert read_scontrol(text) == JobState(state, "node[1-2]", "", expected, "/a/b c/job-7.log")


def test_scontrol_without_a_job_is_nothing() -> None:
    assert read_scontrol("slurm_load_jobs error: Invalid job id specified") is None


def test_the_run_directory_is_read_as_bash_would() -> None:
    text = "#!/bin/bash\nexport OTHER=1\n  export RUN='/a b/$c'  # here\n"
    assert run_dir_of_script(text, "RUN", {}) == "/a b/$c"
    assert run_dir_of_script("echo RUN=3", "RUN", {}) is None
    assert run_dir_of_script("export RUN=$SCRATCH/r1", "RUN", {"SCRATCH": "/s"}) == "/s/r1"
    for unknown in ("$SCRATCH/r1", "`pwd`/r1", '"$(pwd)"'):
        with pytest.raises(ValueError, match="RUN="):
            run_dir_of_script(f"export RUN={unknown}", "RUN", {})


@pytest.mark.parametrize(
    ("text", "code"),
    [("0:0", 0), ("3:0", 3), ("0:9", 137), ("0:15", 143), ("0:31", 159), ("0:53", 1), ("0:125", 1), ("", None)],
)
def test_numbers_that_are_no_signals_are_failures_of_slurm(text: str, code: int | None) -> None:
    assert exit_code_of(text) == code


def test_a_script_that_slurm_could_not_start_has_the_cause() -> None:
    assert read_sacct("7|FAILED|0:53|node1|None\n", "7") == JobState("FAILED", "node1", NOT_STARTED, 1)
    text = SCONTROL.format(state="FAILED", reason="RaisedSignal:53(Real-time_signal_19)", code="0:53", nodes="node1")
    found = read_scontrol(text)
    assert found is not None and (found.reason, found.exit_code) == (NOT_STARTED, 1)


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        *((reason, True) for reason in NEVER),
        ("QOSMaxGRESPerJob", True),
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocMaxCpuPerJobLimit", True),
        ("QOSMinGRES", True),
        ("AssocGrpGRES", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("Priority", False),
        ("Resources", False),
        ("BeginTime", False),
        ("", False),
    ],
)
def test_reasons_that_no_wait_changes(reason: str, never: bool) -> None:
    assert (never_starts(reason) is not None) is never
