"""The processes of agent.command. Each is started again when it ends, until the run does."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from hpc_rl.config.rl.agent import AgentConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.endpoint.sessions import Sessions
from hpc_rl.system import owned
from hpc_rl.system.files import tail
from hpc_rl.system.search_path import users_environment

MOST_FAILURES = 3
"""Failures of one process in a row, without a session that any agent has ended, after which the run ends."""
_PAUSE_S = 1.0
"""Before a process is started again."""
_GRACE_S = 2 * owned.PATIENCE_S
_PROXIES = ("no_proxy", "NO_PROXY")


class AgentProcesses:
    """The processes of agent.command; none if it is not set.

    Each has a coroutine in the event loop of the sessions, which starts it and waits for its end: the kernel ends a
    process together with the thread that has started it (`die_with_parent`). What the process has started itself ends
    with it (hpc_rl.system.owned).

    Args:
        base_url: of the endpoint.
        logs: folder for their output.

    Raises:
        UserError: there is no such program.
    """

    def __init__(self, config: AgentConfig, base_url: str, sessions: Sessions, logs: Path) -> None:
        self._command, self._base_url, self._sessions, self._logs = config.command, base_url, sessions, logs
        self._count = config.processes if self._command else 0
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: dict[int, tuple[int, int]] = {}
        """Of each process: failures in a row, and the sessions that agents had ended at the latest one."""
        self._has_warned = False
        """Of processes that take no session."""
        if self._command and shutil.which(self._command[0]) is None:
            raise UserError(
                f"agent.command: found no program {self._command[0]} in {Path.cwd()} or on PATH; give its path"
            )

    async def serve(self) -> None:
        """Start each process again and again, until `close`.

        Raises:
            RunError: one has failed again and again.
        """
        self._tasks = [asyncio.create_task(self._serve(number)) for number in range(self._count)]
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """End all processes, with everything that they have started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, number: int) -> None:
        name, log = f"agent {number}", self._logs / f"node0-agent{number}.log"
        while True:
            key = self._sessions.admit(name)
            try:
                code = await self._run(agent_environment(os.environ, self._base_url, key), log)
                reason = f"{name} ended with exit code {code}"
            except OSError as error:
                code, reason = owned.NOT_STARTED, f"{name} cannot be started: {error}"
            has_taken = self._sessions.dismiss(key, reason)
            again = "and is started again; its output is in"
            if code != 0:
                self._count_failure(number, reason, log)
                print(f"warning: {reason}, {again} {log}", flush=True)
            elif not (has_taken or self._has_warned):
                self._has_warned = True
                print(f"warning: {reason} before it took a session, {again} {log}", flush=True)
            await asyncio.sleep(_PAUSE_S)

    async def _run(self, environ: Mapping[str, str], log: Path) -> int:
        """Run a process to its end, and return the exit code. If this is cancelled, the process is ended."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as output:
            child = await asyncio.create_subprocess_exec(
                *owned.command(self._command),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return await child.wait()
        finally:
            if child.returncode is None:
                await _end(child)

    def _count_failure(self, number: int, reason: str, log: Path) -> None:
        """Count a failure of a process. Raise RunError if it is one too many."""
        rewarded = self._sessions.rewarded
        failures, before = self._failures.get(number, (0, 0))
        failures = failures + 1 if rewarded == before else 1
        self._failures[number] = failures, rewarded
        if failures == MOST_FAILURES:
            raise RunError(
                f"agent.command failed {MOST_FAILURES} times in a row, and no agent has ended a session meanwhile: "
                f"{reason}; the end of {log}:\n{tail(log)}"
            )


async def _end(child: asyncio.subprocess.Process) -> None:
    """End a process with SIGTERM, and with SIGKILL after _GRACE_S."""
    child.terminate()
    try:
        await asyncio.wait_for(child.wait(), _GRACE_S)
    except TimeoutError:
        child.kill()
        await child.wait()


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
