"""submitit's Slurm executor, with a rendered script.

submitit writes the script to a file, calls sbatch, and raises its errors. This module replaces the text of the script
(it can be edited by hand and contains no pickle), the words of the command, and the reading of its answer. submitit's
jobs are not used, because they read states only from sacct: `hpc_rl.slurm.commands` watches and cancels.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from hpc_rl.config.compose import compose
from hpc_rl.config.tree import flat
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.liveness.activity import doing
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import ROOT
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import CLUSTERS, Place, changed_words, here, is_single
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.directives import clusters_of, overruled
from hpc_rl.submission.script.render import render
from hpc_rl.system.search_path import without_empty_entries

SUBMIT_TIMEOUT_S = 120
"""A site's submit plugin may be slow, and an interrupted submission may still have been accepted."""
TRIALS_S = 180
"""Deadline for all trials of one search of `site detect`."""
_TIME_OVER = 124
_NOT_RUN = (_TIME_OVER, 126, 127)
"""Exit codes of timeout(1): the time is over, or the program cannot be executed, or is missing."""
_ANSWER = re.compile(r"(?:(\d+)|Submitted batch job (\d+))(?:(?:;| on cluster )(\S+))?")
"""sbatch's answer, with --parsable or without it (sbatch(1))."""
_UNCLEAR = re.compile("timed out on send/recv|receive failure|zero bytes were transmitted", re.IGNORECASE)
"""Errors of sbatch after the controller may have received the job."""
_LOOK = (
    "The job may be in the queue, so its files stay: look for it with squeue --me, and end it with scancel before you "
    "submit again"
)
_UNREACHABLE = re.compile("Unable to contact slurm controller|establish a configuration source", re.IGNORECASE)


class ScriptExecutor(SlurmExecutor):
    """Submit one finished script without changing it.

    Args:
        folder: existing folder for the script during the submission. Slurm copies the script, so the folder may be
            temporary.
        options: further options of sbatch; they take precedence over those in the script.
        place: the cluster that the job has to be in; None for the one that script and environment ask for.
    """

    def __init__(self, folder: Path, script: str, options: Sequence[str] = (), place: Place | None = None) -> None:
        super().__init__(folder)
        self._script = script
        self._options = options
        self._asked = place or place_for(script, os.environ)
        self.place = self._asked
        """Where the job is, after the submission."""

    def submit_script(self) -> str:
        """Submit the script with sbatch, and return the id of the job.

        Raises:
            UnclearError: the job may be in the queue.
            UserError: sbatch refused; the message quotes it.
        """
        try:
            # submitit both prints and raises sbatch's error; one message is enough.
            with doing("waiting for Slurm (sbatch)"), contextlib.redirect_stderr(io.StringIO()):
                job = self._submit_command("")
        except FailedJobError as error:
            reason = refused_because(str(error))
            if _is_unclear(error.__cause__, reason):
                raise UnclearError(f"sbatch did not state whether it accepted the job: {reason}. {_LOOK}") from error
            if _UNREACHABLE.search(reason):
                raise UserError(
                    f"sbatch cannot reach Slurm ({reason}): on a login node of a cluster, try again later; elsewhere, "
                    "add --local to run the job on this machine"
                ) from error
            raise UserError(f"sbatch refused the job: {reason}") from error
        return str(job.job_id)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        command = _sbatch(self._script, self._asked, SUBMIT_TIMEOUT_S)
        return [*command, "--parsable", *self._options, str(submission_file_path)]

    def _get_job_id_from_submission_command(self, string: str | bytes) -> str:  # type: ignore[override]
        job_id, cluster = submitted(string if isinstance(string, str) else string.decode(errors="replace"))
        self.place = replace(
            self._asked, cluster=cluster or (self._asked.cluster if is_single(self._asked.cluster) else "")
        )
        return job_id

    def _num_tasks(self) -> int:
        return 1


def refusal(script: str) -> str | None:
    """Return why sbatch would refuse a script, or None if it would accept it. Nothing is submitted.

    Raises:
        NoAnswer: sbatch is missing, or takes too long.
    """
    command = [*_sbatch(script, place_for(script, os.environ), commands.TIMEOUT_S), "--test-only"]
    with doing("waiting for Slurm (sbatch --test-only)"):
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode in _NOT_RUN:
        raise commands.NoAnswer(f"sbatch --test-only does not answer within {commands.TIMEOUT_S} s, or is missing")
    return refused_because(done.stderr) if done.returncode else None


def limited_trials() -> Callable[[str], str | None]:
    """Return `profile_refusal` with a deadline for all calls together; after it, they raise NoAnswer."""
    deadline = time.monotonic() + TRIALS_S

    def refuses(profile: str) -> str | None:
        if time.monotonic() > deadline:
            raise commands.NoAnswer(f"sbatch --test-only accepted no job within {TRIALS_S} s")
        return profile_refusal(profile)

    return refuses


def profile_refusal(profile: str) -> str | None:
    """Return why sbatch refuses a job on one GPU, or on all GPUs of a node, with a profile; None if it accepts both.

    Args:
        profile: text of a profile whose partition, GPUs and node size are set.

    Raises:
        NoAnswer: sbatch does not answer.
    """
    values = flat(yaml.safe_load(profile))
    gpus = values.get("slurm.node.gpus", 1)
    device = "cpu" if values.get("trainer.device") == "cpu" else "cuda"
    for count in sorted({1, gpus}):
        given = {"trainer.device": device, "trainer.n_gpus_per_node": count, "slurm.job_name": "site-detect"}
        config = compose("torchrun", settings=given, site=values)
        job = Job("torchrun", config, RunDir((ROOT / "site-detect").absolute()), Path.cwd(), (sys.executable,))
        if message := refusal(render(job)):
            return message
    return None


def place_for(script: str, environ: Mapping[str, str]) -> Place:
    """Return the place that a script and the environment ask for; the script takes precedence."""
    return here(environ, clusters_of(script) or None)


def _sbatch(script: str, place: Place, timeout_s: int) -> list[str]:
    """Return the beginning of a command that calls sbatch with the variables that this script leaves open.

    The cluster is an option, because variables of this shell may name another one.
    """
    wanted = {**place.environment(os.environ), **without_empty_entries(os.environ)}
    for name in (*overruled(os.environ, script), *CLUSTERS):
        wanted.pop(name, None)
    return ["env", *changed_words(os.environ, wanted), "timeout", str(timeout_s), "sbatch", *place.words("sbatch")]


def submitted(stdout: str) -> tuple[str, str]:
    """Return the job id and the cluster that sbatch --parsable prints; the cluster is empty for the local one.

    A wrapper of a site may print other lines, or leave out --parsable.

    Raises:
        UnclearError: no line is sbatch's answer, or several lines with different answers could be.
    """
    found = {
        (match[1] or match[2], match[3] or "")
        for line in stdout.splitlines()
        if (match := _ANSWER.fullmatch(line.strip()))
    }
    if len(found) != 1:
        shown = "; ".join(line.strip() for line in stdout.splitlines() if line.strip())[-300:]
        raise UnclearError(
            f"sbatch accepted the job, but its output does not state one job id: {shown or 'it is empty'}. {_LOOK}"
        )
    return found.pop()


_SIGNALS = 128
"""A shell, such as a wrapper of sbatch, adds the number of the signal that ended its last program."""


def _is_unclear(cause: BaseException | None, reason: str) -> bool:
    """Return whether the controller may have accepted a job although sbatch has failed, or was ended."""
    if not isinstance(cause, subprocess.CalledProcessError) or cause.returncode < 0 or cause.returncode > _SIGNALS:
        return True
    return cause.returncode == _TIME_OVER or _UNCLEAR.search(reason) is not None


def refused_because(stderr: str) -> str:
    """Return sbatch's errors on one line."""
    lines = [line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line) or f"no answer within {SUBMIT_TIMEOUT_S} s"
