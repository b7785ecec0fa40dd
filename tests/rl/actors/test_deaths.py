"""What is said about an actor that died, for each of the ways in which it may have."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayError

from hpc_rl.rl.actors import deaths
from hpc_rl.rl.actors.deaths import ActorLabel, DeathCause, Evidence, Role, death_cause, exit_cause, leave_reason
from hpc_rl.system.files import tail

GONE = Evidence(
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n\tpid: 4009\n\tip: 10.0.0.2\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error."
)
"""All that Ray reports of a process that was killed."""


def ended(kind: str, detail: str) -> Evidence:
    return Evidence(f"The actor is dead because ... Worker exit type: {kind} Worker exit detail: {detail}\nmore")


CASES: dict[str, tuple[Evidence, str, int]] = {
    "the kernel, for memory": (
        replace(GONE, out_of_memory=True),
        "killed for lack of memory: lower trainer.micro_tokens, or request more --mem",
        137,
    ),
    "a signal": (
        replace(GONE, out_of_memory=False),
        "killed (signal 9) by a user or a program, or for lack of memory (though the kernel counted no such kill in",
        137,
    ),
    "a signal, on a node without a counter": (GONE, "killed (signal 9) by a user or a program, or for lack of", 137),
    "a node that is lost": (
        replace(GONE, lost_node="health check failed", out_of_memory=True),
        "its node is lost (health check failed)",
        1,
    ),
    "Ray's memory monitor": (
        ended("NODE_OUT_OF_MEMORY", "Memory on the node was 30 GB / 31 GB"),
        "killed by Ray's memory monitor, because the node was running low on memory: lower trainer.micro_tokens, or",
        137,
    ),
    "a crash that Python reports": (
        replace(GONE, log="    step 3\n    Fatal Python error: Segmentation fault\n\n    Thread 0x7"),
        "crashed (signal 11, SIGSEGV)",
        139,
    ),
    "a crash that Ray reports": (
        replace(GONE, log="    [rank0] *** SIGABRT received at time=1 on cpu 0 ***"),
        "crashed (signal 6, SIGABRT)",
        134,
    ),
    "SIGTERM": (
        ended(
            "SYSTEM_ERROR",
            "Worker exits unexpectedly by a signal. SystemExit is raised (sys.exit is called). "
            "Exit code: 1. The process receives a SIGTERM.",
        ),
        "terminated (signal 15, SIGTERM)",
        143,
    ),
    "a reason that it left": (
        replace(
            GONE,
            log="    hpc-rl: process 4009 ends with exit code 137: its worker 1 of 2 died\n        the end of a log:\n"
            "            line\n    INFO more\n",
        ),
        "its worker 1 of 2 died\nthe end of a log:\n    line",
        137,
    ),
    "a reason that another process left": (
        replace(GONE, log="    hpc-rl: process 4008 ends with exit code 137: its worker 1 of 2 died\n"),
        "killed (signal 9) by a user or a program, or for lack of",
        137,
    ),
    "its own exit": (
        ended("USER_ERROR", "Worker exits with an exit code 3."),
        "it ended by itself with exit code 3; its log has the reason",
        1,
    ),
    "Ray": (
        ended("INTENDED_SYSTEM_EXIT", "Worker exits because the actor is killed. The actor is dead because its owner"),
        "Ray ended it (Worker exits because the actor is killed.",
        1,
    ),
    "an unknown cause": (Evidence("The actor never started.\nmore"), "Ray ended it (The actor never started.)", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_how_an_actor_ended(name: str) -> None:
    known, text, code = CASES[name]
    found = death_cause(known, "worker")
    assert (found.text[: len(text)], found.exit_code) == (text, code)


@pytest.mark.parametrize(
    ("role", "remedy"),
    [("worker", "trainer.micro_tokens"), ("engine", "rollout.max_num_seqs"), ("driver", "data.train_batch_size")],
)
def test_the_advice_fits_the_role(role: Role, remedy: str) -> None:
    assert f"lower {remedy}" in death_cause(replace(GONE, out_of_memory=True), role).text


def test_a_reason_that_a_process_leaves_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    left = DeathCause("no space: remove files\nthe end of a log:\n    line 1\n    line 2", 3)
    leave_reason(left)
    log = tmp_path / "engine.log"
    log.write_text(f"before\n{capsys.readouterr().out}after\n")
    error = GONE.error.replace("4009", str(os.getpid()))
    assert death_cause(Evidence(error, log=tail(log)), "engine") == left
    assert death_cause(Evidence(GONE.error, log=tail(log)), "engine") != left


@pytest.mark.parametrize(
    ("code", "text", "job"),
    [
        (137, "killed (signal 9) by a user or a program, or for lack of memory", 137),
        (139, "ended by signal 11 (SIGSEGV); its log has the reason", 139),
        (143, "ended by signal 15 (SIGTERM); its log has the reason", 143),
        (3, "it ended by itself with exit code 3; its log has the reason", 1),
        (0, "it ended by itself with exit code 0; its log has the reason", 1),
    ],
)
def test_how_a_process_ended(code: int, text: str, job: int) -> None:
    found = exit_cause(code, "engine")
    assert (found.text[: len(text)], found.exit_code) == (text, job)


def test_an_actors_name_has_the_folder_of_its_log() -> None:
    assert str(ActorLabel("rank 1", "worker", Path("/runs/a/attempt-1/node*-rank1.log"))) == (
        "rank 1 (log in /runs/a/attempt-1)"
    )
    assert str(ActorLabel("rank 1", "worker")) == "rank 1"


def test_a_ray_that_does_not_answer_hides_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RayError("timeout")

    monkeypatch.setattr(deaths.ray, "nodes", fail)
    found = deaths.evidence(RayActorError(error_msg="it has died\n\tip: 10.0.0.1\n"), None)
    assert (found.lost_node, found.out_of_memory) == (None, None) and "it has died" in found.error
