"""The server of the engine `sglang`: a process of SGLang on this node that only this process uses.

Its arguments: https://docs.sglang.io/advanced_features/server_arguments.html. They travel in a file, because everyone
on the node can read the arguments of a process, and one of them is the key.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hpc_rl.errors import RunError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.deaths import DeathCause, leave_reason
from hpc_rl.rl.actors.process import own_folder
from hpc_rl.rl.rollout.http_calls import HttpAnswer, UnreachableError
from hpc_rl.rl.rollout.sglang.own_connection import own_client
from hpc_rl.system import owned, processes
from hpc_rl.system.files import tail
from hpc_rl.system.search_path import module_command, safe_variables

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 10000, 32767
"""Below the kernel's ephemeral range: while the server loads its model, no connection takes its port."""
PORT_TRIES = 100
POLL_S = 0.2
HEALTH_TIMEOUT_S = 30.0
"""SGLang answers /health within 20 s, after it has generated a token."""
CALL_TIMEOUT_S = 600.0
"""Time limit of every call but /generate."""
END_S = 15.0
NOTICE_S = 5.0
"""Time in which the end of the server shows after its connections have ended."""
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
"""Of the log, which has the output of an earlier server if this one replaces it."""
LOG_LINES = 20
"""Lines at the end of the server's log that a message shows."""


class SglangServer:
    """A server, which ends with this process in all cases.

    Args:
        settings: SGLang's arguments, without those for its address and key.
        log: the file for its output; None: that of this process.
        start_s: time within which it has to be ready.

    Raises:
        RunError: it ended, or was not ready in time.
    """

    def __init__(self, settings: Mapping[str, Any], log: Path | None, start_s: float) -> None:
        # SGLang makes arguments of a command line of its file, and none may begin with a hyphen.
        port, key = free_port(), secrets.token_hex(32)
        self._log, self._key = log, key
        self.client = own_client(f"http://{LOOPBACK}:{port}", key)
        with own_folder("sglang-") as folder:
            file = Path(folder) / "server.yaml"
            address = {"host": LOOPBACK, "port": port, "api-key": key}
            file.write_text(json.dumps({**settings, **address}))  # JSON is YAML
            self._process = self._start(file)
            self._wait_until_ready(start_s)
        self._hide_key()

    def post(self, path: str, body: Mapping[str, Any]) -> HttpAnswer:
        """Make a call that has to succeed.

        Raises:
            SystemExit: it failed; see `give_up`.
        """
        try:
            answer = self.client.post(path, body, CALL_TIMEOUT_S)
        except UnreachableError as error:
            self.lost(path, error)
        if answer.status != 200:
            self.give_up(f"{path}: the server answered {answer.reason()}")
        return answer

    def is_healthy(self) -> bool:
        """Return whether the server generates, which takes it a second or more to find out."""
        return self._problem() is None

    def check_is_alive(self) -> None:
        """Give up if the server has ended."""
        if self._process.poll() is not None:
            self.give_up("the server ended")

    def lost(self, path: str, error: UnreachableError) -> NoReturn:
        """Give up, because a call to this path had no answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(NOTICE_S)
        self.give_up(f"{path}: {error}")

    def give_up(self, found: str) -> NoReturn:
        """End the server, write to this process's log what was found, and end this process.

        A server that has failed once is not repaired: the driver repeats the requests on other engines, and starts
        another one in this place.
        """
        ended = self._process.poll()
        self.close()
        code = 1 if ended in (None, 0) else processes.shell_code(ended)
        how = "it was still running, and has been ended" if ended is None else f"its exit code was {code}"
        leave_reason(DeathCause(f"rollout.name=sglang: {found} ({how}){self._end_of_log()}", code))
        raise SystemExit(code)

    def close(self) -> None:
        """End the server and all its processes."""
        processes.end(self._process, END_S)

    def _start(self, file: Path) -> subprocess.Popen[bytes]:
        command = module_command("sglang.launch_server", "--config", str(file))
        output = sys.stdout.fileno() if self._log is None else os.open(self._log, FLAGS, 0o600)
        own = str(Path(owned.__file__).parents[2])  # of this package; other paths of a Ray worker are none of SGLang's
        paths = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            return subprocess.Popen(
                owned.command(command),
                env={**os.environ, **safe_variables(), "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            if self._log is not None:
                os.close(output)

    def _problem(self) -> str | None:
        """Return why the server does not generate; None if it does."""
        try:
            answer = self.client.get("/health", HEALTH_TIMEOUT_S)
        except UnreachableError as error:
            return str(error)
        return None if answer.status == 200 else f"/health: {answer.reason()}"

    def _wait_until_ready(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        with heart.waiting():
            while problem := self._problem():
                ended = self._process.poll()
                if ended is None and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    continue
                self.close()
                self._hide_key()
                late = f"was not ready within {start_s:.0f} s ({problem})"
                found = late if ended is None else f"ended with exit code {ended}"
                advice = "raise trainer.model_timeout_s" if ended is None else "correct what the log shows"
                raise RunError(
                    f"rollout.name=sglang: python -m sglang.launch_server {found}: {advice}, or use another engine"
                    f"{self._end_of_log()}"
                )

    def _end_of_log(self) -> str:
        if self._log is None:
            return ""
        return f"\nthe end of {self._log}:\n{tail(self._log, LOG_LINES)}"

    def _hide_key(self) -> None:
        """Overwrite the key in the log: at its start, SGLang writes all its arguments there."""
        if self._log is None:
            return
        with self._log.open("r+b") as log:
            text, key = log.read(), self._key.encode()
            start = text.find(key)
            while start >= 0:
                log.seek(start)
                log.write(b"*" * len(key))
                start = text.find(key, start + len(key))


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on, in a random place.

    Raises:
        RunError: none was found.
    """
    for _ in range(PORT_TRIES):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        with socket.socket() as tried:
            try:
                tried.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise RunError(
        f"rollout.name=sglang: {PORT_TRIES} random ports between {FIRST_PORT} and {LAST_PORT} were tried for the "
        "server, and all are in use on this node: use another node"
    )
