"""What a node entry does when it is signalled."""

import json
import math
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from hpc_rl.node.rank import RankExit
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.node.signals import (
    ASKED_GRACE_S,
    ONE_S,
    SAVING_S,
    ReceivedSignal,
    ask_to_save,
    end_when,
    has_failed,
    has_to_end,
    time_left,
)
from hpc_rl.run_dir import RunDir, terminated_file

TERM = ReceivedSignal(signal.SIGTERM, 0.0)


@pytest.fixture
def rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    (tmp_path / "attempt-1").mkdir()
    return Rendezvous(tmp_path / "attempt-1", ("a", "b"), 0)


def rank_ended(rendezvous: Rendezvous, code: int) -> None:
    ended = RankExit(1, 1, code, False, 1.0)
    (rendezvous.attempt_dir / ".node1-rank1.exit").write_text(f"1\n{json.dumps(ended.__dict__)}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_first_signal_leaves_time_to_save_and_the_second_does_not(rendezvous: Rendezvous, number: int) -> None:
    first = ReceivedSignal(number, 100.0)
    assert not has_to_end([first], 1e6, rendezvous)
    assert has_to_end([first, ReceivedSignal(signal.SIGTERM, 100.0 + 1.01 * ONE_S)], 0, rendezvous)
    assert has_to_end([ReceivedSignal(signal.SIGINT, 0)], 0, rendezvous)


def test_slurm_may_send_one_signal_twice(rendezvous: Rendezvous) -> None:
    twice = [ReceivedSignal(signal.SIGTERM, 100.0), ReceivedSignal(signal.SIGTERM, 100.0 + 0.99 * ONE_S)]
    assert not has_to_end(twice, 0, rendezvous)


def test_the_time_is_short_if_the_whole_job_is_signalled(rendezvous: Rendezvous) -> None:
    terminated_file(rendezvous.attempt_dir).touch()
    assert not has_to_end([TERM], SAVING_S - 0.1, rendezvous)
    assert has_to_end([TERM], SAVING_S, rendezvous)


def test_slurm_leaves_time_only_until_it_kills_the_job(rendezvous: Rendezvous) -> None:
    assert time_left(rendezvous.attempt_dir) == math.inf
    file = terminated_file(rendezvous.attempt_dir)
    file.touch()
    assert 0 < time_left(rendezvous.attempt_dir) <= SAVING_S + ASKED_GRACE_S
    os.utime(file, (1, 1))
    assert time_left(rendezvous.attempt_dir) == 0


def test_there_is_no_time_to_save_after_a_failure(rendezvous: Rendezvous) -> None:
    for code, failed in ((75, False), (0, False), (137, True)):
        rank_ended(rendezvous, code)
        assert has_failed(rendezvous) == has_to_end([TERM], 0, rendezvous) == failed
    rank_ended(rendezvous, 0)
    rendezvous.fail(1)
    assert has_failed(rendezvous)


def test_without_slurm_the_first_signal_counts(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_ID")
    assert has_to_end([TERM], 0, rendezvous)


def test_a_reason_to_stop_is_not_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ask_to_save(run, "preemption")
    assert run.stop.read_text() == "preemption\n"
    run.stop.write_text("user\n")
    ask_to_save(run, "preemption")
    assert run.stop.read_text() == "user\n"
    ask_to_save(RunDir(tmp_path / "no folder"), "preemption")


def test_a_child_ends_when_the_event_is_set() -> None:
    for program, code in (("echo; exec sleep 600", -15), ("trap '' TERM; echo; while :; do sleep 0.1; done", -9)):
        asked = threading.Event()
        with subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE) as child:
            assert child.stdout and child.stdout.readline()
            end_when(asked, child, grace_s=0.3)
            assert child.poll() is None
            asked.set()
            assert child.wait(600) == code
