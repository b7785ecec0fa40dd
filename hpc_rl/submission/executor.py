"""submitit's Slurm executor, with a rendered script and a more robust job state.

submitit writes, submits, cancels and watches jobs. This module replaces the text of the script (it can be edited by
hand and contains no pickle), the number of tasks, and the job state, which submitit reads only from sacct.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from hpc_rl.errors import UserError
from hpc_rl.host.search_path import without_empty_entries
from hpc_rl.slurm import commands
from hpc_rl.submission.directives import overruled

SUBMIT_TIMEOUT_S = 120
"""A site's submit plugin may be slow, and an interrupted submission may still have been accepted."""


_NOT_RUN = (124, 126, 127)
"""Exit codes of timeout(1): the time is over, or the program cannot be executed, or is missing."""


_UNREACHABLE = re.compile("Unable to contact slurm controller|establish a configuration source", re.IGNORECASE)


class StateWatcher(SlurmInfoWatcher):
    """Query sacct, then squeue, then scontrol, so that it works with and without accounting."""

    def update(self) -> None:
        for job_id in self._registered - self._finished:
            try:
                state = commands.job_state(job_id)
            except commands.NoAnswer:
                continue
            if state is not None:
                self._info_dict[job_id] = {"JobID": job_id, "State": state.state, "NodeList": state.nodes}
                if state.ended:
                    self._finished.add(job_id)
        self._num_calls += 1


class ScriptJob(SlurmJob[Any]):
    """A submitted script. Its results are in the run directory."""

    watcher = StateWatcher(delay_s=15)


class ScriptExecutor(SlurmExecutor):
    """Submit one finished script without changing it.

    Args:
        folder: existing folder for the script during the submission. Slurm copies the script, so the folder may be
            temporary.
        options: further options of sbatch; they take precedence over those in the script.
    """

    job_class = ScriptJob

    def __init__(self, folder: Path, script: str, options: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self._script = script
        self._options = options

    def submit_script(self) -> ScriptJob:
        """Submit the script with sbatch.

        Raises:
            UserError: sbatch refused; the message quotes it.
        """
        try:
            # submitit both prints and raises sbatch's error; one message is enough.
            with contextlib.redirect_stderr(io.StringIO()):
                job = self._submit_command("")
        except FailedJobError as error:
            reason = refused_because(str(error))
            if _UNREACHABLE.search(reason):
                raise UserError(
                    f"sbatch cannot reach Slurm ({reason}): on a login node of a cluster, try again later; elsewhere, "
                    "add --local to run the job on this machine"
                ) from error
            raise UserError(f"sbatch refused the job: {reason}") from error
        assert isinstance(job, ScriptJob)
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*_sbatch(self._script, SUBMIT_TIMEOUT_S), *self._options, str(submission_file_path)]

    def _num_tasks(self) -> int:
        return 1


def refusal(script: str) -> str | None:
    """Return why sbatch would refuse a script, or None if it would accept it. Nothing is submitted.

    Raises:
        NoAnswer: sbatch is missing, or takes too long.
    """
    command = [*_sbatch(script, commands.TIMEOUT_S), "--test-only"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode in _NOT_RUN:
        raise commands.NoAnswer(f"sbatch --test-only does not answer within {commands.TIMEOUT_S} s, or is missing")
    return refused_because(done.stderr) if done.returncode else None


def _sbatch(script: str, timeout_s: int) -> list[str]:
    """Return the beginning of a command that calls sbatch with the variables that this script leaves open."""
    # Inside an allocation, its SLURM_* variables would become options of the new job and contradict the script.
    inherited = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    clean = [word for name in [*inherited, *overruled(os.environ, script)] for word in ("-u", name)]
    lists = [f"{name}={value}" for name, value in without_empty_entries(os.environ).items()]
    return ["env", *clean, *lists, "timeout", str(timeout_s), "sbatch"]


def refused_because(stderr: str) -> str:
    """Return sbatch's errors on one line."""
    lines = [line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line) or f"no answer within {SUBMIT_TIMEOUT_S} s"
