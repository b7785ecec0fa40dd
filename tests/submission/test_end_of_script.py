"""How the job script ends: what it records, and whether it queues its job again."""

import json
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.submission.script.render import support_text
from tests.submission.script.test_render import run_script, torchrun_job

RUNS = "Restarts=0 PreemptTime=None ExcNodeList=(null)"
TERM = 'kill -TERM "$(ps -o ppid= -p $$)"; '
"""The step has its parent signalled, as Slurm signals the script."""
LOSES = 'printf "node2\\nnode3\\n" > "$HPC_RL_ATTEMPT_DIR/.lost"; exit 1'
LATER = "sleep 1; "  # until bash has run the trap, which it does when `wait` is interrupted


def end(tmp: Path, step: str, job: str = RUNS, first: str = "", **settings: Any) -> tuple[int, dict[str, Any], str]:
    """Run the script with a step, and return its exit code, what it recorded, and what it asked of Slurm."""
    calls = tmp / "seen.json.scontrol"
    calls.unlink(missing_ok=True)
    one = torchrun_job(tmp / "run", **settings)
    done, _ = run_script(one, tmp, step=step, first=f"export JOB='{job}'\n{first}")
    recorded = json.loads(one.run_dir.status.read_text())
    assert not one.run_dir.stop.exists(), done.stderr
    return done.returncode, recorded, (calls.read_text() if calls.exists() else "") + done.stdout


def stops(reason: str) -> str:
    return f'echo {reason} > "$HPC_RL_RUN_DIR/stop"; exit 75'


RULES = r"""
set -euo pipefail
eval "$SUPPORT"
timeout() { while [[ $1 == --* ]]; do shift; done; shift; "$@"; }
scontrol() { echo "JobId=7 $JOB"; }
requeue() { echo "requeue: $1 [${2:-}]"; exit; }
queue_again_if_due
echo "${terminated:-end}"
"""
"""queue_again_if_due alone, which decides, with a `requeue` that prints what it was called with."""
PREEMPTED = "Restarts=1 PreemptTime=2026-11-22T07:22:12"
RESTARTED = "Restarts=2 PreemptTime=None"
BY_SLURM = "Slurm has queued job 7 again\nREQUEUED"
TWO_LOST = "requeue: lost n2,n3 ({} of at most 2 times) [n2,n3]"
TOO_MANY = "hpc-rl: lost n2; job 7 is not queued again (slurm.max_node_failures is 2)\nend"


@dataclass(frozen=True)
class Facts:
    """What a decision depends on."""

    code: int
    stop: str = ""
    terminated: str = ""
    slurm: str = "Restarts=1 PreemptTime=None"
    lost: str = ""
    losses: str = ""
    hangs: tuple[str, ...] = ()
    """Attempts that hung; this one is the second."""


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (Facts(0), "end"),
        (Facts(0, "walltime", lost="n2\n", hangs=("2",), slurm=PREEMPTED), "end"),
        (Facts(1), "end"),
        (Facts(1, "walltime"), "end"),
        (Facts(1, slurm=RESTARTED), "end"),
        (Facts(143), "end"),
        (Facts(143, slurm=""), "end"),
        # It has saved.
        (Facts(75, "walltime"), "requeue: stopped before the walltime []"),
        (Facts(75, "requeue"), "requeue: stopped before the requeue []"),
        (Facts(75, "preemption", slurm=PREEMPTED), "requeue: stopped before the preemption []"),
        (Facts(75, "walltime", lost="n2\n"), "requeue: stopped before the walltime []"),
        (Facts(75, "user"), "end"),
        (Facts(75, "user", slurm=PREEMPTED, hangs=("2",), lost="n2\n"), "end"),
        (Facts(75), "end"),
        # Slurm ends it.
        (Facts(0, terminated="CANCELLED"), "CANCELLED"),
        (Facts(75, "preemption", "CANCELLED", PREEMPTED), "CANCELLED"),
        (Facts(75, "preemption", "CANCELLED", RESTARTED), f"hpc-rl: stopped before the preemption; {BY_SLURM}"),
        (Facts(1, "preemption", "CANCELLED", RESTARTED), f"hpc-rl: ended by Slurm before it had saved; {BY_SLURM}"),
        (Facts(0, "", "TIMEOUT", RESTARTED), f"hpc-rl: ended by Slurm before it had saved; {BY_SLURM}"),
        (Facts(143, "user", "TIMEOUT", RESTARTED), f"hpc-rl: ended by Slurm before it had saved; {BY_SLURM}"),
        (Facts(75, "walltime", "TIMEOUT"), "requeue: stopped before the walltime []"),
        (Facts(75, "user", "TIMEOUT"), "TIMEOUT"),
        (Facts(143, "walltime", "TIMEOUT", PREEMPTED), "TIMEOUT"),
        (Facts(1, "walltime", "TIMEOUT", lost="n2\n"), "TIMEOUT"),
        (Facts(1, "walltime", "TIMEOUT", hangs=("2",)), "requeue: the job hung (2 is silent) []"),
        (Facts(1, "", "CANCELLED", hangs=("2",)), "CANCELLED"),
        # Preempted. A job that was suspended has a PreemptTime too.
        (Facts(143, slurm=PREEMPTED), "requeue: preempted before it had saved []"),
        (Facts(1, "preemption", slurm=PREEMPTED), "requeue: preempted before it had saved []"),
        (Facts(1, "preemption", slurm=PREEMPTED, lost="n2\n"), "requeue: preempted before it had saved []"),
        (Facts(1, slurm=PREEMPTED), "end"),
        (Facts(75, slurm=PREEMPTED), "end"),
        (Facts(143, "user", slurm=PREEMPTED), "end"),
        # Nodes are lost.
        (Facts(1, lost="n2\nn3\n"), TWO_LOST.format(1)),
        (Facts(1, lost="n2\nn3\n", losses="7 1 n9\n"), TWO_LOST.format(2)),
        (Facts(1, lost="n2\nn3\n", losses="6 1 a\n70 2 b\n6 7 c\n"), TWO_LOST.format(1)),
        (Facts(1, lost="n2\n", losses="7 1 n9\n7 1 n8\n"), TOO_MANY),
        (Facts(1, lost="n2\n", losses="7 1 n9\n7 1 n8\n", hangs=("2",)), TOO_MANY),
        (Facts(1, lost="n2\n", losses="7 1 n9\n7 1 n8\n", slurm=RESTARTED), f"hpc-rl: lost n2; {BY_SLURM}"),
        (Facts(1, "user", lost="n2\n"), "end"),
        # It hangs.
        (Facts(1, hangs=("2",)), "requeue: the job hung (2 is silent) []"),
        (Facts(1, hangs=("1", "2")), "hpc-rl: the previous attempt also hung; job 7 is not queued again\nend"),
        (Facts(1, hangs=("1", "2"), slurm=RESTARTED), f"hpc-rl: the previous attempt also hung; {BY_SLURM}"),
        (Facts(1, hangs=("1",)), "end"),
        (Facts(1, "user", hangs=("2",)), "end"),
    ],
)
def test_a_job_is_queued_again_unless_it_has_ended_for_good(tmp_path: Path, facts: Facts, decision: str) -> None:
    attempt = tmp_path / "attempt-2"
    for number in (1, 2):
        (tmp_path / f"attempt-{number}").mkdir()
    files = {tmp_path / "stop": facts.stop, attempt / ".lost": facts.lost, tmp_path / "lost-nodes": facts.losses}
    files |= {tmp_path / f"attempt-{number}/.hang": f"{number} is silent\nand more\n" for number in facts.hangs}
    for path, text in files.items():
        if text:
            path.write_text(text)
    given = {
        **{"SUPPORT": support_text(), "JOB": facts.slurm, "SLURM_RESTART_COUNT": "1", "PATH": os.environ["PATH"]},
        **{"HPC_RL_RUN_DIR": str(tmp_path), "HPC_RL_ATTEMPT_DIR": str(attempt), "hpc_rl_max_node_failures": "2"},
        **{"job": "7", "attempt": "2", "code": str(facts.code), "lost": str(attempt / ".lost")},
    }
    rules = RULES.replace("queue_again_if_due\n", f"terminated={facts.terminated}\nqueue_again_if_due\n")
    done = subprocess.run(["bash", "-c", rules], env=given, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{decision}\n", "")
    is_recorded = bool(facts.lost and facts.code and not facts.terminated)
    recorded = f"7 2 {','.join(facts.lost.split())}\n" * is_recorded
    assert (tmp_path / "lost-nodes").exists() is bool(facts.losses or recorded)
    assert not facts.lost or not recorded or (tmp_path / "lost-nodes").read_text() == facts.losses + recorded


def test_a_run_that_the_user_stopped_is_not(tmp_path: Path) -> None:
    for step in (
        stops("user"),
        f'echo 75 > "$HPC_RL_ATTEMPT_DIR/.outcome"; {stops("user")}'.replace("exit 75", "exit 0"),
    ):
        code, recorded, said = end(tmp_path, step)
        assert (code, recorded["state"], said) == (75, "STOPPED", "")
    code, recorded, said = end(tmp_path, stops("walltime"), **{"slurm.requeue": False})
    assert (code, recorded["state"], said) == (75, "STOPPED", "")


def test_a_cancelled_run_is_not_queued_again_although_it_has_saved(tmp_path: Path) -> None:
    code, recorded, said = end(tmp_path, TERM + LATER + stops("preemption"))
    assert (code, recorded["state"], recorded["exit_code"]) == (143, "CANCELLED", 143)
    assert "requeue" not in said
    assert (tmp_path / "run/attempt-1/.terminated").read_text() == "CANCELLED\n"


def test_a_run_that_slurm_queues_again_is_not_cancelled(tmp_path: Path) -> None:
    code, recorded, said = end(tmp_path, TERM + LATER + stops("preemption"), job="Restarts=1 PreemptTime=None")
    assert (code, recorded["state"]) == (143, "REQUEUED")
    assert "requeue 7" not in said and "stopped before the preemption; Slurm has queued job 7 again" in said
    _, recorded, said = end(tmp_path, TERM + LATER + "exit 1", job="Restarts=1 PreemptTime=None")
    assert recorded["state"] == "REQUEUED" and "before it had saved; Slurm has queued job 7 again" in said


def test_the_walltime_that_ended_during_the_save(tmp_path: Path) -> None:
    over = "export SLURM_JOB_END_TIME=1795270000\n"
    code, recorded, said = end(tmp_path, TERM + LATER + "exit 1", first=over)
    assert (code, recorded["state"]) == (143, "TIMEOUT") and "requeue" not in said
    code, recorded, said = end(tmp_path, TERM + LATER + stops("walltime"), first=over)
    assert (code, recorded["state"]) == (75, "REQUEUED") and "requeue 7" in said


def test_a_job_whose_end_has_moved_is_cancelled_and_has_no_timeout(tmp_path: Path) -> None:
    over = "export SLURM_JOB_END_TIME=1795270000\n"
    moved = 'echo 9795270000 > "$HPC_RL_ATTEMPT_DIR/.job-end"; '
    assert end(tmp_path, moved + TERM + LATER + "exit 1", first=over)[1]["state"] == "CANCELLED"


AWAY = """
timeout() { while [[ $1 == --* ]]; do shift; done; shift; "$@"; }
scontrol() {
  [ -e "$SEEN.away" ] || { command scontrol "$@"; return; }
  echo "$*" >> "$SEEN.unanswered"
  return 1
}
sleep() {
  if [ "$1" = 10 ]; then rm -f "$SEEN.away"; JOB=${LATER_JOB:-$JOB}; eval "${LATER:-}"; else command sleep 0.1; fi
}
"""
"""The controller is out of reach from the end of the step until the first wait for it."""
LOSES_BOTH = 'touch "$SEEN.away"; echo node2 > "$HPC_RL_ATTEMPT_DIR/.lost"; exit 1'


def test_a_controller_that_is_away_is_asked_again(tmp_path: Path) -> None:
    _, recorded, said = end(tmp_path, LOSES_BOTH, job=RUNS.replace("(null)", "bad"), first=AWAY)
    assert recorded["state"] == "REQUEUED"
    assert said.startswith("requeue 7\nupdate JobId=7 ExcNodeList=node2,bad\n"), said
    assert "requeue" not in (tmp_path / "seen.json.unanswered").read_text()


def test_a_node_that_was_cut_off_does_not_end_the_next_attempt(tmp_path: Path) -> None:
    """Slurm has queued the job again meanwhile. The other nodes are not lost."""
    first = f"export LATER_JOB='{RUNS.replace('Restarts=0', 'Restarts=1')}'\n{AWAY}"
    _, recorded, said = end(tmp_path, LOSES_BOTH, first=first)
    assert recorded["state"] == "REQUEUED"
    assert "requeue 7" not in said and "ExcNodeList" not in said
    assert "may have been cut off instead of node2, so no node is excluded" in said


@pytest.mark.parametrize("how", ["kill -TERM $$", "export JOB_STATE=CANCELLED", "export JOB_STATE=COMPLETING"])
def test_a_job_that_is_cancelled_while_the_controller_is_away_is_not_queued_again(tmp_path: Path, how: str) -> None:
    code, recorded, said = end(tmp_path, LOSES_BOTH, first=f"LATER='{how}'\n{AWAY}")
    assert (code, recorded["state"], recorded["exit_code"]) == (143, "CANCELLED", 143)
    assert "requeue 7" not in said and "job 7 was cancelled, and is not queued again" in said


@pytest.mark.parametrize("how", ["kill -TERM $$", "export JOB_STATE=COMPLETING"])
@pytest.mark.parametrize("why", ["preemption", "walltime", "requeue"])
def test_a_job_that_ends_for_another_reason_while_the_controller_is_away_is_queued_again(
    tmp_path: Path, how: str, why: str
) -> None:
    """The grace time of a preemption or the walltime is over, or Slurm has queued the job again."""
    changed = {
        "preemption": f"JOB='{RUNS.replace('PreemptTime=None', 'PreemptTime=2026-11-22T07:22:12')}'",
        "walltime": "HPC_RL_JOB_END=1",
        "requeue": f"JOB='{RUNS.replace('Restarts=0', 'Restarts=1')}'",
    }
    _, recorded, said = end(tmp_path, LOSES_BOTH, first=f"LATER={shlex.quote(f'{changed[why]}; {how}')}\n{AWAY}")
    assert recorded["state"] == "REQUEUED" and ("requeue 7\n" in said) is (why != "requeue")
    assert "cancelled" not in said


def test_nodes_are_not_excluded_if_slurm_has_queued_the_job_before_it_was_asked(tmp_path: Path) -> None:
    _, recorded, said = end(tmp_path, LOSES, job=RUNS.replace("Restarts=0", "Restarts=1"))
    assert recorded["state"] == "REQUEUED" and "requeue 7" not in said and "ExcNodeList" not in said


def test_a_controller_that_never_answers_is_not_asked_for_ever(tmp_path: Path) -> None:
    first = AWAY.replace('rm -f "$SEEN.away"', ":")
    code, recorded, said = end(tmp_path, LOSES_BOTH, first=first)
    assert (code, recorded["state"]) == (1, "FAILED") and "requeue 7" not in said


@pytest.mark.parametrize("ends", ["exit 1", LOSES])
def test_an_attempt_that_was_replaced_keeps_the_stop_file_of_the_next_one(tmp_path: Path, ends: str) -> None:
    job = torchrun_job(tmp_path / "run")
    step = f'mkdir "$HPC_RL_RUN_DIR/attempt-2"; echo walltime > "$HPC_RL_RUN_DIR/stop"; {ends}'
    run_script(job, tmp_path, step=step, first=f"export JOB='{RUNS}'\n")
    assert job.run_dir.stop.read_text() == "walltime\n"


def test_an_attempt_that_was_replaced_records_no_state(tmp_path: Path) -> None:
    begins = (
        f'mkdir "$HPC_RL_RUN_DIR/attempt-2"; echo \'{{"state": "RUNNING"}}\' > "$HPC_RL_RUN_DIR/status.json"; {LOSES}'
    )
    _, recorded, _ = end(tmp_path, begins)
    assert recorded == {"state": "RUNNING"}


def test_one_task_of_an_array_is_queued_again_and_not_all(tmp_path: Path) -> None:
    task = "export SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=3\n"
    _, recorded, said = end(tmp_path, stops("walltime"), first=task)
    assert recorded["state"] == "REQUEUED" and "requeue 7_3\n" in said
    _, _, said = end(tmp_path, LOSES, first=task)
    assert "requeue 7_3\nupdate JobId=7_3 ExcNodeList=node2,node3\n" in said


@pytest.mark.parametrize(("step", "exit_code", "otherwise"), [("LOSES", 1, "FAILED"), ("walltime", 75, "STOPPED")])
def test_slurm_may_have_queued_the_job_at_the_same_time(
    tmp_path: Path, step: str, exit_code: int, otherwise: str
) -> None:
    work = LOSES if step == "LOSES" else stops(step)
    for restarts, count, state in ((1, 0, "REQUEUED"), (0, 0, otherwise), (1, 1, otherwise), (2, 1, "REQUEUED")):
        for earlier in ("seen.json.refused", "run/lost-nodes"):
            (tmp_path / earlier).unlink(missing_ok=True)
        refused = f"Restarts={restarts} ExcNodeList=(null)"
        first = f"export REFUSED='{refused}' SLURM_RESTART_COUNT={count}\n"
        code, recorded, said = end(tmp_path, work, job=RUNS.replace("Restarts=0", f"Restarts={count}"), first=first)
        assert (code, recorded["state"], recorded["exit_code"]) == (exit_code, state, exit_code)
        assert ("update JobId=7 ExcNodeList=node2,node3" in said) is (state == "REQUEUED" and step == "LOSES")


def test_lost_nodes_that_cannot_be_recorded_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lost-nodes").symlink_to("/no/such/folder/file")
    _, recorded, said = end(tmp_path, LOSES)
    assert recorded["state"] == "REQUEUED" and "lost node2,node3 (0 of at most 3 times)" in said


def test_lost_nodes_are_left_out_a_limited_number_of_times(tmp_path: Path) -> None:
    two = {"slurm.max_node_failures": 2}
    excluded = f"{RUNS.replace('(null)', 'bad[1-2]')} Features=x"
    for job, nodes in ((RUNS, "node2,node3"), (excluded, "node2,node3,bad[1-2]")):
        code, recorded, said = end(tmp_path, LOSES, job=job, **two)
        assert (code, recorded["state"]) == (1, "REQUEUED")
        assert f"requeue 7\nupdate JobId=7 ExcNodeList={nodes}\n" in said
    assert (tmp_path / "run/lost-nodes").read_text() == "7 1 node2,node3\n7 2 node2,node3\n"
    code, recorded, said = end(tmp_path, LOSES, **two)
    assert (code, recorded["state"]) == (1, "FAILED") and "requeue" not in said


@pytest.mark.parametrize(("end_in_s", "reason"), [(None, "walltime"), (270, "walltime"), (400, "preemption")])
def test_a_warning_long_before_the_walltime_is_a_preemption(tmp_path: Path, end_in_s: int | None, reason: str) -> None:
    when = "" if end_in_s is None else f"$(($(date +%s) + {end_in_s}))"
    first = f"export SLURM_JOB_END_TIME={when} CONTROLLER_TIME=$(date +%s); squeue() {{ :; }}\n"
    usr2 = TERM.replace("TERM", "USR2") + 'while [ ! -e "$HPC_RL_RUN_DIR/stop" ]; do sleep 0.1; done; exit 75'
    _, recorded, said = end(tmp_path, usr2, first=first)
    assert recorded["state"] == "REQUEUED" and f"stopped before the {reason};" in said


def test_a_second_warning_ends_the_step(tmp_path: Path) -> None:
    usr2 = TERM.replace("TERM", "USR2")
    waits = 'while [ ! -e "$HPC_RL_RUN_DIR/stop" ]; do sleep 0.1; done; '
    code, recorded, said = end(tmp_path, f"{usr2}{waits}{usr2}for i in {{1..300}}; do sleep 0.1; done; exit 75")
    assert (code, recorded["state"], said) == (143, "FAILED", "")
