"""The processes of agent.command. Each is started again when it ends, until the run does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.config.agent import AgentConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.host import owned
from hpc_rl.host.files import tail
from hpc_rl.host.processes import end
from hpc_rl.rl.endpoint.sessions import Sessions

MOST_FAILURES = 3
"""Failures of agent.command in a row, without a session that any agent has ended, after which the run ends."""
_PAUSE_S = 1.0
"""Before a process is started again."""
_GRACE_S = 2 * owned.PATIENCE_S
_PROXIES = ("no_proxy", "NO_PROXY")


class AgentProcesses:
    """The processes of agent.command; none if it is not set.

    Each has a thread, which starts it and waits for its end: the kernel ends a process together with the thread that
    has started it (`die_with_parent`). What the process has started itself ends with it (hpc_rl.host.owned).

    Args:
        base_url: of the endpoint.
        logs: folder for their output.

    Raises:
        UserError: there is no such program.
    """

    def __init__(self, config: AgentConfig, base_url: str, sessions: Sessions, logs: Path) -> None:
        self._command, self._base_url, self._sessions = config.command, base_url, sessions
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._failures = 0
        self._rewarded = 0
        """Sessions that agents had ended at the latest failure."""
        self._error: RunError | None = None
        self._threads: list[threading.Thread] = []
        if not self._command:
            return
        if shutil.which(self._command[0]) is None:
            raise UserError(
                f"agent.command: found no program {self._command[0]} in {Path.cwd()} or on PATH; give its path"
            )
        for number in range(config.processes):
            log = logs / f"node0-agent{number}.log"
            thread = threading.Thread(target=self._serve, args=(number, log), name=f"agent-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise the error that has ended the processes, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all processes, with everything that they have started."""
        with self._lock:
            self._closed.set()
            running = list(self._running.values())
        for child in running:
            child.terminate()
        for child in running:
            end(child, _GRACE_S)
        for thread in self._threads:
            thread.join(_GRACE_S)

    def _serve(self, number: int, log: Path) -> None:
        """Start a process again and again. This is its thread."""
        name = f"agent {number}"
        while not self._closed.is_set():
            key = self._sessions.admit(name)
            code = self._run(number, agent_environment(os.environ, self._base_url, key), log)
            if self._closed.is_set():
                return
            reason = f"{name} ended with exit code {code}"
            self._sessions.dismiss(key, reason)
            if code != 0:
                if self._fails_again(reason, log):
                    return
                print(f"warning: {reason}, and is started again; its output is in {log}", flush=True)
            self._closed.wait(_PAUSE_S)

    def _run(self, number: int, environ: Mapping[str, str], log: Path) -> int:
        """Run a process to its end, and return the exit code."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as output, self._lock:
            if self._closed.is_set():
                return 0
            self._running[number] = child = subprocess.Popen(
                [sys.executable, "-m", owned.__name__, *self._command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return child.wait()

    def _fails_again(self, reason: str, log: Path) -> bool:
        """Count a failure. Return whether it is one too many, and ends the run."""
        with self._lock:
            rewarded = self._sessions.rewarded
            self._failures = self._failures + 1 if rewarded == self._rewarded else 1
            self._rewarded = rewarded
            if self._failures < MOST_FAILURES:
                return False
            self._error = RunError(
                f"agent.command failed {MOST_FAILURES} times in a row, and no agent has ended a session meanwhile: "
                f"{reason}; the end of {log}:\n{tail(log)}"
            )
        return True


def agent_environment(environ: Mapping[str, str], base_url: str, key: str) -> dict[str, str]:
    """Return the variables of an agent: those of this process, and where it finds the policy, without a proxy."""
    host = base_url.split("//")[1].partition(":")[0]
    direct = {name: ",".join(filter(None, [environ.get(name), host])) for name in _PROXIES}
    return {**environ, **direct, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "PYTHONUNBUFFERED": "1"}
