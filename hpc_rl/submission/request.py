"""From what was typed to the job that is meant."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.config.compose import compose
from hpc_rl.config.job import JobConfig
from hpc_rl.errors import UserError
from hpc_rl.run_dir import ENV_RUN_DIR, RunDir
from hpc_rl.runs.status import ROOT
from hpc_rl.sites.profile import load_profile
from hpc_rl.slurm.states import run_dir_of_script
from hpc_rl.submission import queue
from hpc_rl.submission.after import find_after
from hpc_rl.submission.script import Job


@dataclass(frozen=True)
class Request:
    """The words of `submit` and `render`."""

    kind: str
    overrides: Sequence[str]
    """key=value, as typed."""
    program: tuple[str, ...]
    """The user's own program and its arguments, for torchrun and ray."""
    settings: Mapping[str, Any]
    """Dotted key -> value, from flags."""
    after: str | None
    """A job id, a run or a sweep, to be waited for."""
    run_dir: Path | None
    site: str | None = None
    """File or shipped name of a site profile, above those that are found by themselves."""
    taken: frozenset[str] = frozenset()
    """Names that are as good as given away."""

    def job(self) -> Job:
        """The job; without a name given it is called by the first free one of sft-1, sft-2, ...

        A dry run thus shows the very script of the submission after it.

        Raises:
            UserError: the configuration is wrong, or there is no job to wait for.
        """
        config = self.config()
        path = self.run_dir or ROOT / (config.slurm.job_name or free_name(self.kind, self.taken))
        after = None if self.after is None else find_after(self.after)
        if after is not None and "dependency" in config.slurm.sbatch:
            raise UserError("--after and --sbatch dependency=... are the same option of sbatch: give one of them")
        return Job(self.kind, config, RunDir(path.absolute()), Path.cwd(), self.program, after)

    def config(self) -> JobConfig:
        return compose(self.kind, self.overrides, self.settings, load_profile(self.site).values)

    def reserve(self) -> Job:
        """The job, with a run directory that no submission at the same moment has taken."""
        while True:
            job = self.job()
            is_named = self.run_dir is not None or job.config.slurm.job_name is not None
            if is_named or queue.reserve(job.run_dir.path):
                return job


def free_name(stem: str, taken: frozenset[str] = frozenset()) -> str:
    """The first of stem-1, stem-2, ... that no run has."""
    number = 1
    while (ROOT / f"{stem}-{number}").exists() or f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def job_of_script(kind: str, script: Path) -> tuple[Job, str]:
    """A script that `render` wrote and somebody may have edited, and its text.

    Raises:
        UserError: it cannot be read, or does not say its run directory.
    """
    try:
        text = script.read_text()
        path = run_dir_of_script(text, ENV_RUN_DIR, os.environ)
    except OSError as error:
        raise UserError(f"--script {script}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--script {script}: write the run directory without $ or ` in the line {error}") from error
    if path is None:
        raise UserError(f"--script {script} has no line `export {ENV_RUN_DIR}=...`: it was not rendered by hpc-rl")
    return Job(kind, JobConfig(), RunDir(Path(path).absolute()), Path.cwd()), text
