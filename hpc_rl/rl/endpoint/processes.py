"""The processes of agent.command. Each is started again when it ends, until the run does."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from hpc_rl.config.agent import AgentConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.host import owned
from hpc_rl.host.files import tail
from hpc_rl.host.processes import end
from hpc_rl.host.search_path import users_environment
from hpc_rl.rl.loop_thread import LoopThread
from hpc_rl.rl.endpoint.sessions import Sessions

MOST_FAILURES = 3
"""Failures of one process in a row, without a session that any agent has ended, after which the run ends."""
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
        loop: that of the sessions.
        logs: folder for their output.

    Raises:
        UserError: there is no such program.
    """

    def __init__(
        self, config: AgentConfig, base_url: str, sessions: Sessions, loop: LoopThread, logs: Path
    ) -> None:
        self._command, self._base_url = config.command, base_url
        self._sessions, self._loop = sessions, loop
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._failures: dict[int, tuple[int, int]] = {}
        """Of each process: failures in a row, and the sessions that agents had ended at the latest one."""
        self._has_warned = False
        """Of processes that take no session."""
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
            key = self._loop.ask(partial(self._sessions.admit, name))
            try:
                code = self._run(number, agent_environment(os.environ, self._base_url, key), log)
                reason = f"{name} ended with exit code {code}"
            except OSError as error:
                code, reason = owned.NOT_STARTED, f"{name} cannot be started: {error}"
            if self._closed.is_set():
                return
            has_taken = self._loop.ask(partial(self._sessions.dismiss, key, reason))
            again = "and is started again; its output is in"
            if code != 0:
                if self._fails_again(number, reason, log):
                    return
                print(f"warning: {reason}, {again} {log}", flush=True)
            elif not (has_taken or self._has_warned):
                self._has_warned = True
                print(f"warning: {reason} before it took a session, {again} {log}", flush=True)
            self._closed.wait(_PAUSE_S)

    def _run(self, number: int, environ: Mapping[str, str], log: Path) -> int:
        """Run a process to its end, and return the exit code."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as output, self._lock:
            if self._closed.is_set():
                return 0
            self._running[number] = child = subprocess.Popen(
                owned.command(self._command),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return child.wait()

    def _fails_again(self, number: int, reason: str, log: Path) -> bool:
        """Count a failure of a process. Return whether it is one too many, and ends the run."""
        rewarded = self._sessions.rewarded
        failures, before = self._failures.get(number, (0, 0))
        failures = failures + 1 if rewarded == before else 1
        self._failures[number] = failures, rewarded
        if failures < MOST_FAILURES:
            return False
        self._error = RunError(
            f"agent.command failed {MOST_FAILURES} times in a row, and no agent has ended a session meanwhile: "
            f"{reason}; the end of {log}:\n{tail(log)}"
        )
        return True


def agent_environment(environ: Mapping[str, str], base_url: str, key: str) -> dict[str, str]:
    """Return the variables of an agent: those of this process, and where it finds the policy, without a proxy."""
    hosts = [environ.get(name) for name in _PROXIES] + [urlsplit(base_url).hostname]
    direct = ",".join(dict.fromkeys(filter(None, hosts)))  # programs read one of the two
    return {
        **users_environment(environ),
        **dict.fromkeys(_PROXIES, direct),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "PYTHONUNBUFFERED": "1",
    }
