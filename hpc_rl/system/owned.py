"""A program of another project that ends with its parent, together with everything that it has started.

    subprocess.Popen(owned.command([PROGRAM, ARGUMENT, ...]))

The kernel ends a child with its parent, but not the child's own children. This process stands between the two: it
adopts what the program leaves behind, and ends all of it. If this process is killed, the kernel kills the program.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from hpc_rl.system import processes
from hpc_rl.system.search_path import module_command

PATIENCE_S = 5.0
"""Between SIGTERM and SIGKILL: nothing that the program would save is needed."""
NOT_STARTED = 127
"""Exit code if the program cannot be started, as a shell has it."""


def command(program: Sequence[str]) -> list[str]:
    """Return the command with which this process starts a program that ends with it."""
    return module_command("hpc_rl.system.owned", str(os.getpid()), *program)


def main(parent: int, argv: list[str]) -> int:
    """Run the program and return its exit code, as a shell shows it.

    Args:
        parent: id of the process that started this one.
    """
    processes.die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel knew that it matters
        return processes.shell_code(-signal.SIGTERM)
    processes.adopt_orphans()
    try:
        child = processes.start(argv, os.environ, sys.stdout.buffer, death=signal.SIGKILL)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", flush=True)
        return NOT_STARTED
    processes.forward_termination(child, PATIENCE_S)
    code = processes.shell_code(processes.wait(child))
    processes.end_descendants()
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
