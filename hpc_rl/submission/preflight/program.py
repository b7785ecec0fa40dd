"""Checks of the job's Python, and of the user's own program."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hpc_rl.adapters.program import Program
from hpc_rl.config.job import JobConfig
from hpc_rl.errors import UserError
from hpc_rl.software.installation import install_command
from hpc_rl.software.versions import version_of
from hpc_rl.system.ownership import refuse_foreign

PYTHON_TIMEOUT_S = 60
_EXTRAS = {"ray": "rl", "vllm": "rl", "bitsandbytes": "qlora", "torchao": "torchao", "liger_kernel": "liger"}
"""Package -> the extra of hpc-rl that brings it, if it is not `train`."""
_MISSING = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"


def check_packages(python: str | None, needs: Sequence[str], purpose: str, extra: str | None = "train") -> str | None:
    """Check that a Python has packages, without importing them.

    Args:
        python: slurm.python, or None for the Python that runs hpc-rl.
        purpose: the part of the job that needs the packages, for the message.
        extra: the extra of hpc-rl that brings packages that are not in the table; None: there is none.

    Returns:
        Why it could not be checked, if so.

    Raises:
        UserError: packages are missing.
    """
    if python is None:
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
    elif not Path(python).exists():
        return f"slurm.python {python} is not on this machine: it is checked when the job starts"
    else:
        try:
            said = _output_of(python, "-c", _MISSING, *needs)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"slurm.python {python} cannot be started: {error}") from error
        if said is None:
            return f"slurm.python {python} does not start on this machine: it is checked when the job starts"
        missing = said.split()
    if missing:
        it, lacking = "it" if len(missing) == 1 else "them", python or sys.executable
        extra = next((_EXTRAS[name] for name in missing if name in _EXTRAS), extra)
        how = f" ({install_command(extra, lacking)})" if extra else ""
        raise UserError(
            f"{purpose} needs {', '.join(missing)}, and {lacking} lacks {it}: install {it} there{how}, "
            f"or set slurm.python to the Python of an environment that has {it}"
        )
    return None


def has_unknown_python(config: JobConfig) -> bool:
    """Return whether an image, a module or a command decides which Python a job has."""
    return config.container.image is not None or bool(config.slurm.modules or config.slurm.setup)


@cache
def transformers_version(python: str | None) -> str:
    """Return the version of transformers in a Python; empty if this machine does not show it.

    Args:
        python: slurm.python, or None for the Python that runs hpc-rl.
    """
    if python is None:
        return version_of("transformers") or ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return _output_of(python, "-c", "import importlib.metadata as m; print(m.version('transformers'))") or ""
    return ""


def check_requirements(python: str | None, file: str) -> None:
    """Check that a Python can use an option, by a file of hpc_rl that prints why it cannot.

    Args:
        python: slurm.python, or None for the Python that runs hpc-rl.

    Raises:
        UserError: what the file printed.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # `check_packages` reports it
        if found := _output_of(python or sys.executable, str(Path(__file__).parents[2] / file)):
            raise UserError(found)


def _output_of(python: str, *words: str) -> str | None:
    """Return what a program of another Python prints; None if it fails."""
    command = [python, "-P", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def check_torchrun_program(program: tuple[str, ...]) -> None:
    """Check the program of `submit torchrun -- ...`: a script, or -m and a module."""
    if not program:
        raise UserError("no program given: hpc-rl submit torchrun --nodes 2 -- train.py --lr 1e-4")
    program = Program(program).command
    if program[0] == "-m":
        if len(program) < 2:
            raise UserError("-m needs the name of a module: hpc-rl submit torchrun -- -m my.module")
        refuse_foreign("the folder in which -m looks for modules", Path.cwd())
        return
    if program[0].endswith((".sh", ".bash")):
        raise UserError(
            f"{program[0]} is a shell script, and the job starts the ranks itself: write the Python program that the "
            "script starts, such as -- train.py --lr 1e-4 or -- -m torchtitan.train --module llama3 --config NAME"
        )
    if not Path(program[0]).is_file():
        raise UserError(f"program {program[0]}: no such file in {Path.cwd()}")
    _refuse_foreign_program("program", program[0])


def check_ray_program(program: tuple[str, ...]) -> str | None:
    """Check the program of `submit ray -- ...`: any command, such as python and a script."""
    if not program:
        raise UserError("no program given: hpc-rl submit ray --nodes 2 -- python my_driver.py")
    if program[0].endswith(".py") and not os.access(program[0], os.X_OK):
        raise UserError(f"program {program[0]} is not executable: write -- python {shlex.join(program)}")
    return _check_command("program", program)


def check_conflicts(found: tuple[str, ...]) -> None:
    """Refuse options of a program that contradict the job."""
    if found:
        raise UserError("\n".join(found))


def check_agent(command: tuple[str, ...]) -> str | None:
    """Check agent.command."""
    if command[0].endswith(".py") and not os.access(command[0], os.X_OK):
        raise UserError(f"agent.command: {command[0]} is not executable: write [python,{','.join(command)}]")
    return _check_command("agent.command:", command)


def _check_command(what: str, command: tuple[str, ...]) -> str | None:
    """Check that a program exists, or the script of Python."""
    if re.fullmatch(r"(.*/)?python[\d.]*", command[0]):
        script = next((word for word in command[1:] if not word.startswith("-")), None)
        if script is not None and script == command[1] and not Path(script).exists():
            raise UserError(f"{what} {script}: no such file in {Path.cwd()}")
        if script is not None and script == command[1]:
            _refuse_foreign_program(what, script)
        elif "-m" in command or "-c" in command:
            refuse_foreign(f"{what} {' '.join(command[:3])}: the folder in which Python looks for modules", Path.cwd())
        return None
    if "/" in command[0] and not Path(command[0]).is_file():
        raise UserError(f"{what} {command[0]}: no such file")
    if "/" in command[0]:
        _refuse_foreign_program(what, command[0])
    if "/" not in command[0] and shutil.which(command[0]) is None:
        return f"{what} {command[0]} is looked up when the job starts: it is not on PATH here"
    return None


def _refuse_foreign_program(what: str, name: str) -> None:
    """Refuse a relative path that others could replace. An absolute one was chosen with its owner."""
    if not Path(name).is_absolute():
        refuse_foreign(f"{what} {name}", Path(name))
