import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.liveness import heartbeat, stacks
from hpc_rl.liveness.heartbeat import ENV_HEARTBEATS, Heartbeat, HeartbeatWriter, beats_in_calls, read_heartbeat
from tests.sandbox.processes import DEADLINE_S


@pytest.fixture
def heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeartbeatWriter:
    monkeypatch.setenv(ENV_HEARTBEATS, str(tmp_path))
    monkeypatch.setattr(stacks, "answer_requests", lambda _path: None)  # it would stay registered in this process
    found = HeartbeatWriter()
    found.begin("rank 1")
    return found


def beat_of(folder: Path) -> Heartbeat:
    found = read_heartbeat(folder / f"{os.getpid()}.heartbeat")
    assert found is not None
    return found


def test_a_pickle_names_the_heart_of_the_process() -> None:
    assert pickle.loads(pickle.dumps(heartbeat.heart)) is heartbeat.heart


def test_a_process_records_its_phase_and_step(heart: HeartbeatWriter, tmp_path: Path) -> None:
    assert beat_of(tmp_path) == Heartbeat(os.getpid(), "rank 1", "run", 0, is_first=True, waits=False, count=1)
    heart.at_step(7)
    with heart.phase("data"):
        assert beat_of(tmp_path) == Heartbeat(os.getpid(), "rank 1", "data", 7, is_first=True, waits=False, count=3)
        heart.beat()
        assert beat_of(tmp_path).count == 4
    assert (beat_of(tmp_path).phase, beat_of(tmp_path).count) == ("run", 5)
    with heart.phase("data"):
        assert beat_of(tmp_path).is_first is False
        with heart.phase("save"):
            assert (beat_of(tmp_path).phase, beat_of(tmp_path).is_first) == ("save", True)
        assert (beat_of(tmp_path).phase, beat_of(tmp_path).is_first) == ("data", False)
        heart.at_step(8)
    assert (beat_of(tmp_path).phase, beat_of(tmp_path).step) == ("run", 8)


def test_waiting_is_not_work(heart: HeartbeatWriter, tmp_path: Path) -> None:
    with heart.phase("gen"):
        with heart.waiting():
            assert (beat_of(tmp_path).phase, beat_of(tmp_path).waits) == ("gen", True)
            with heart.phase("combine"):
                assert beat_of(tmp_path).waits is False
        assert beat_of(tmp_path).waits is False


def test_a_phase_that_fails_ends_too(heart: HeartbeatWriter, tmp_path: Path) -> None:
    with pytest.raises(ValueError), heart.phase("data"):
        raise ValueError
    assert beat_of(tmp_path).phase == "run"


def test_other_threads_beat_and_have_no_phases(heart: HeartbeatWriter, tmp_path: Path) -> None:
    def work() -> None:
        with heart.phase("theirs"):
            heart.beat()

    with heart.phase("mine"):
        before = beat_of(tmp_path).count
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert (beat_of(tmp_path).phase, beat_of(tmp_path).count) == ("mine", before + 1)


def test_an_actor_beats_in_its_calls(heart: HeartbeatWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "heart", heart)

    @beats_in_calls
    class Actor:
        def update(self, number: int, *, twice: bool) -> tuple[int, str]:
            return number * (1 + twice), beat_of(tmp_path).phase

        def _own(self) -> str:
            return beat_of(tmp_path).phase

    heart.begin("an actor", waits=True)
    assert Actor().update(2, twice=True) == (4, "update")
    assert Actor()._own() == "run"
    assert beat_of(tmp_path).waits is True


def test_without_a_folder_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENV_HEARTBEATS, raising=False)
    heart = HeartbeatWriter()
    heart.begin("rank 0")
    with heart.phase("data"), heart.waiting():
        heart.at_step(1)
        heart.beat()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": 1}', b'{"pid": 1, "name": "a", "further": 2}'])
def test_a_broken_file_is_no_beat(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.heartbeat").write_bytes(content)
    assert read_heartbeat(tmp_path / "1.heartbeat") is None
    assert read_heartbeat(tmp_path / "2.heartbeat") is None


PROGRAM = """
import sys, threading
from pathlib import Path
from hpc_rl.liveness import stacks
stacks.on_request(lambda: Path(sys.argv[2]).write_text("called"))
stacks.answer_requests(Path(sys.argv[1]))
def where_the_program_waits():
    print("ready", flush=True)
    {wait}
where_the_program_waits()
"""
WAITS = {
    "in Python": "while True: pass",
    "in a library": "import ctypes; libc = ctypes.CDLL(None); [libc.pause() for _ in range(9)]",
}
"""A blocked library call runs no Python code, so no handler that is written in Python."""


@pytest.mark.parametrize("where", WAITS)
def test_a_process_writes_its_stacks_when_asked(tmp_path: Path, where: str) -> None:
    program = PROGRAM.format(wait=WAITS[where])
    arguments = [sys.executable, "-c", program, str(tmp_path / "stacks"), str(tmp_path / "called")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            for times in (1, 2):
                assert stacks.asked(child.pid)
                until(lambda: (tmp_path / "stacks").read_bytes().count(stacks.END) == times)  # noqa: B023
            assert (tmp_path / "called").read_text() == "called"
            text = (tmp_path / "stacks").read_text()
            main = re.split(r"^(?:Current thread|Thread) 0x", text.split("(end")[0], flags=re.MULTILINE)[-1]
            assert "where_the_program_waits" in main and "in _finish" in text
            assert child.poll() is None
        finally:
            child.kill()


def test_a_process_that_does_not_answer_is_not_asked() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert stacks.asked(child.pid) is False
        child.send_signal(signal.SIGKILL)
    assert stacks.asked(child.pid) is False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
