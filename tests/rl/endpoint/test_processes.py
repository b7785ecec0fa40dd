"""The processes of agent.command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.rl.agent import AgentConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.converse.loop_thread import LoopThread
from hpc_rl.rl.endpoint import processes
from hpc_rl.rl.endpoint.processes import AgentProcesses, agent_environment
from tests.rl.endpoint.policy import DEADLINE_S, looping

AGENT = """
import os, pathlib, subprocess, sys, time
from openai import OpenAI

run = OpenAI()
while (session := run.post("/sessions", cast_to=object)) is None:
    pass
policy = OpenAI(base_url=session["base_url"])
answer = policy.chat.completions.create(model="x", messages=session["messages"])
out = pathlib.Path(os.environ["OUT"])
if session["row"].get("crash"):
    sys.exit(3)
if session["row"].get("hang"):
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    (out / "partial").write_text(f"{os.getpid()} {child.pid}")
    (out / "partial").rename(out / "pids")
    time.sleep(3600)
run.post(f"/sessions/{session['id']}/reward", cast_to=object, body={"reward": len(answer.choices[0].message.content)})
"""


class Keys:
    """Stands for Sessions."""

    def __init__(self) -> None:
        self.rewarded = 0
        self.dismissed: list[str] = []
        self.has_taken = True

    def admit(self, name: str) -> str:
        return f"key of {name}"

    def dismiss(self, key: str, reason: str) -> bool:
        self.dismissed.append(reason)
        return self.has_taken


def wait_for(condition: Callable[[], Any]) -> None:
    waited = threading.Event()
    for _ in range(100 * DEADLINE_S):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it did not happen")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextmanager
def started(logs: Path, *command: str, keys: Any = None) -> Iterator[Future[None]]:
    """Start a process again and again; yield what raises when it fails again and again."""
    config = AgentConfig(endpoint="loopback", command=list(command))
    loop = LoopThread("sessions")
    found = AgentProcesses(config, "http://127.0.0.1:1/v1", keys or Keys(), logs)
    try:
        yield loop.start(found.serve())
    finally:
        loop.start(found.close()).result(DEADLINE_S)
        loop.close()


def test_an_agent_gets_the_address_without_a_proxy() -> None:
    found = agent_environment({"no_proxy": "a.b", "HOME": "/h"}, "http://10.0.0.1:80/v1", "k")
    assert (found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"], found["HOME"]) == ("http://10.0.0.1:80/v1", "k", "/h")
    assert found["no_proxy"] == found["NO_PROXY"] == "a.b,10.0.0.1"
    both = {"no_proxy": "a.b", "NO_PROXY": "c.d"}
    assert agent_environment(both, "http://[::1]:80/v1", "k")["NO_PROXY"] == "a.b,c.d,::1"
    assert agent_environment({"NO_PROXY": "a.b"}, "http://h:80/v1", "k")["no_proxy"] == "a.b,h"


def test_an_agent_that_fails_again_and_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)
    keys = Keys()
    with (
        started(tmp_path, "sh", "-c", "echo no disk; exit 4", keys=keys) as served,
        pytest.raises(RunError, match=r"agent.command failed 3 times in a row.*\n(    no disk\n){2}    no disk"),
    ):
        served.result(DEADLINE_S)
    assert keys.dismissed == ["agent 0 ended with exit code 4"] * 3


def test_an_agent_that_gets_on_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)

    class Rewarded(Keys):
        def dismiss(self, key: str, reason: str) -> bool:
            self.rewarded += 1
            return super().dismiss(key, reason)

    keys = Rewarded()
    with started(tmp_path, "false", keys=keys) as served:
        wait_for(lambda: len(keys.dismissed) > 2 * processes.MOST_FAILURES)
        assert not served.done()


@pytest.mark.parametrize("has_taken", [True, False])
def test_an_agent_that_ends_well_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_taken: bool
) -> None:
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)
    keys = Keys()
    keys.has_taken = has_taken
    with started(tmp_path, "true", keys=keys) as served:
        wait_for(lambda: len(keys.dismissed) > processes.MOST_FAILURES)
        assert not served.done()
    warning = "warning: agent 0 ended with exit code 0 before it took a session, and is started again"
    assert capsys.readouterr().out.count(warning) == (not has_taken)


def test_only_failures_of_one_process_in_a_row_end_the_run(tmp_path: Path) -> None:
    found = AgentProcesses(AgentConfig(endpoint="loopback"), "", Keys(), tmp_path)  # type: ignore[arg-type]
    for number in (0, 1, 2, 0, 1, 2):
        found._count_failure(number, "it failed", tmp_path / "log")
    with pytest.raises(RunError, match=r"agent.command failed 3 times in a row"):
        found._count_failure(1, "it failed", tmp_path / "log")


def test_an_agent_whose_output_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)
    keys = Keys()
    problem = r"agent 0 cannot be started: \[Errno 2\] No such file or directory: .*missing"
    with started(tmp_path / "missing", "true", keys=keys) as served, pytest.raises(RunError, match=problem):
        served.result(DEADLINE_S)
    assert len(keys.dismissed) == 3


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"agent.command: found no program no-such-agent in .* or on PATH"):
        AgentProcesses(AgentConfig(endpoint="loopback", command=["no-such-agent"]), "", Keys(), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "agent").write_bytes(b"\x7fELF")
    (tmp_path / "agent").chmod(0o755)
    problem = r"agent cannot be started: Exec format error"
    with started(tmp_path, str(tmp_path / "agent")) as served, pytest.raises(RunError, match=problem):
        served.result(DEADLINE_S)


def test_an_agent_of_the_run(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has one session in each of its lives. In one it crashes; in the last one it has to be ended."""
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)
    monkeypatch.setenv("OUT", str(tmp_path))
    (tmp_path / "agent.py").write_text(AGENT)
    command = f"agent.command=[{sys.executable},{tmp_path}/agent.py]"
    with looping(tokenizer, tmp_path, command) as loop:
        asked = loop.ask({"turns": ["three"]}, {"turns": ["crashes"], "crash": 1}, {"turns": ["four"]})
        found = loop.found(asked)
        assert [one.outcome.score for one in found] == [5, None, 4]
        assert found[1].outcome.error == "agent 0 ended with exit code 3"
        loop.ask({"turns": ["hangs"], "hang": 1})
        wait_for((tmp_path / "pids").exists)
    agent, child = map(int, (tmp_path / "pids").read_text().split())
    wait_for(lambda: is_gone(agent) and is_gone(child))
    assert (tmp_path / "node0-agent0.log").stat().st_mode & 0o777 == 0o600
    assert "agent 0 ended with exit code 3, and is started again; its output is in" in capsys.readouterr().out


def test_an_agent_ends_with_its_run_however_that_ends(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, threading; from tests.rl.endpoint.test_processes import started\n"
        "with started(pathlib.Path(sys.argv[1]), 'sh', '-c', f'sleep 3600 & echo $! > {sys.argv[1]}/new; "
        "mv {sys.argv[1]}/new {sys.argv[1]}/pid; wait'): threading.Event().wait()"
    )
    child = os.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", program, str(tmp_path)])
    wait_for((tmp_path / "pid").exists)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())))
