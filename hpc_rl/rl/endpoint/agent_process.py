"""python -m hpc_rl.rl.endpoint.agent_process COMMAND...

Run the command of an agent, and end with its exit code. If this process is terminated, or the one that started it ends,
so does the command, with everything that it has started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hpc_rl.host.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    forward_termination,
    shell_code,
    start,
    wait,
)

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
NOT_STARTED = 127
"""Exit code if the command cannot be started, as a shell has it."""


def main(command: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    die_with_parent()
    adopt_orphans()
    try:
        child = start(command, os.environ, sys.stdout.buffer)
    except OSError as error:
        print(f"agent.command: {command[0]} cannot be started: {error.strerror}", flush=True)
        return NOT_STARTED
    forward_termination(child, GRACE_S)
    code = wait(child)
    end_descendants()
    return shell_code(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
