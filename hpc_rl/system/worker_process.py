"""A process of this package's own that answers calls, and that can be ended if it hangs.

It is `python -P -m MODULE FD`, where FD is a socket for pickled objects. Its module calls die_with_parent, so that the
kernel ends it when the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
from multiprocessing.connection import Connection, wait
from typing import Any

from hpc_rl.system.processes import descendants, shell_code
from hpc_rl.system.search_path import look_last_variables, module_command, users_environment


class ProcessLost(Exception):
    """A process ended, or was ended, without a result of its call. The message is the reason."""


class WorkerProcess:
    """One process. It belongs to the thread that starts it.

    Args:
        module: what it runs.
        send_timeout_s: time limit for sending, so that a process that does not read cannot block its thread.
        closing: file descriptor that becomes readable when results are no longer needed. None: they always are.
    """

    def __init__(self, module: str, send_timeout_s: float, closing: int | None = None) -> None:
        self._closing = [] if closing is None else [closing]
        ours, theirs = socket.socketpair()
        limit = struct.pack("@ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            self._process = subprocess.Popen(
                module_command(module, str(theirs.fileno())),
                env={**users_environment(os.environ), **look_last_variables()},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def send(self, value: Any) -> None:
        """Send an object.

        Raises:
            ProcessLost: the process does not accept it.
        """
        try:
            self._connection.send(value)
        except OSError as error:
            self.end()
            raise ProcessLost(f"accepted no calls ({error})") from error

    def has_answer(self, timeout_s: float) -> bool:
        """Wait for an object, or for the end of the process; return whether `receive` would return at once."""
        return bool(wait([self._connection], timeout_s))

    def receive(self, timeout_s: float) -> Any:
        """Receive an object.

        Raises:
            ProcessLost: the process ended, or it is ended because of the time limit or because of `closing`.
        """
        ready = wait([self._connection, *self._closing], timeout_s)
        try:
            if self._connection in ready:
                return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.end()
            raise ProcessLost(f"ended with exit code {shell_code(self._process.returncode)}") from error
        self.end()
        raise ProcessLost("was ended with its program" if ready else f"took over {timeout_s:g} s and was ended")

    def end(self) -> None:
        """Kill the process, all processes of its session, and all below it."""
        if self._process.returncode is None:
            below = list(descendants(self._process.pid))
            os.killpg(self._process.pid, signal.SIGKILL)
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()
