"""Counts calls to Slurm's commands with wrappers at the front of PATH."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

COMMANDS = ("sinfo", "squeue", "scontrol", "sacct", "sacctmgr", "sbatch", "srun", "scancel", "sprio", "sstat")


class SlurmCalls:
    """Counts the calls of processes that run with `environ`."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._log = folder / "slurm-calls.log"
        wrappers = folder / "slurm-calls"
        wrappers.mkdir()
        for command in COMMANDS:
            wrapper = wrappers / command
            real = shutil.which(command, path=environ["PATH"])
            wrapper.write_text(f'#!/bin/sh\necho "{command} $*" >>"{self._log}"\nexec {real} "$@"\n')
            wrapper.chmod(0o755)
        self.environ = {**environ, "PATH": f"{wrappers}{os.pathsep}{environ['PATH']}"}

    def take(self) -> list[str]:
        """Return the command lines since the last call."""
        found = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return found
