"""From a request, as typed on the command line or made in Python, to the job that it asks for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from hpc_rl.submission.devices import Devices
from hpc_rl.submission.job import Job

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Request:
    """What a user asks for: the words of `submit` and `render`, or the arguments of `hpc_rl.submit`."""

    kind: str
    """Name of a row of KINDS."""
    overrides: Sequence[str] = ()
    """key=value, as typed."""
    program: tuple[str, ...] = ()
    """The user's own program and its arguments, if the kind takes one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value, from flags."""
    after: str | None = None
    """A job id, a run or a sweep that has to complete first."""
    run_dir: Path | None = None
    site: str | None = None
    """File or shipped name of a site profile, above those that are found without a name."""
    local: bool = False
    """Whether the job runs on this machine, without Slurm."""
    is_test: bool = False
    """Whether this is the short trial of `submit --test`."""
    command: tuple[str, ...] = ()
    """The command line, for job.json."""


def plan(request: Request, taken: frozenset[str] = frozenset()) -> Job:
    """The job that a request asks for. Composes its configuration, and changes nothing.

    A job without a name is called by the first free one of sft-1, sft-2, ... so that a dry run shows the very script
    of the submission after it.

    Args:
        taken: names that other jobs of the same command will have.

    Raises:
        UserError: the configuration is wrong, or there is no job to wait for.
    """
    devices = Devices(request.local)
    site = load_profile(request.site).values
    config = compose(request.kind, request.overrides, request.settings, site, devices.fill_in)
    if request.is_test:
        config = _on_test_partition(request, config)
    return job_of(request, config, taken, devices.note)


def job_of(request: Request, config: JobConfig, taken: frozenset[str] = frozenset(), note: str = "") -> Job:
    """The job of a request whose configuration is composed already.

    Raises:
        UserError: its name cannot be one, or there is no job to wait for.
    """
    name = config.slurm.job_name
    if name is not None and not _NAME.fullmatch(name):
        raise UserError(
            f"job name {name!r}: use letters, digits, '.', '_' and '-', and begin with a letter, a digit or '_'"
        )
    after = None if request.after is None else find_after(request.after)
    if after is not None and "dependency" in config.slurm.sbatch:
        raise UserError("--after and --sbatch dependency=... set the same option of sbatch: give one of them")
    run_dir = RunDir(_run_dir(request, config, taken))
    return Job(request.kind, config, run_dir, Path.cwd(), request.program, after, request.command, note)


def reserve(request: Request, job: Job) -> Job:
    """Make the run directory of a planned job.

    A job without a name takes the next free one if another submission was faster.
    """
    is_named = request.run_dir is not None or job.config.slurm.job_name is not None
    while not (is_named or queue.reserve(job.run_dir.path)):
        job = replace(job, run_dir=RunDir(_run_dir(request, job.config, frozenset())))
    return job


def free_name(stem: str, taken: frozenset[str] = frozenset()) -> str:
    """The first of stem-1, stem-2, ... that no run has."""
    number = 1
    while (ROOT / f"{stem}-{number}").exists() or f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def job_of_script(kind: str, script: Path, command: tuple[str, ...] = ()) -> tuple[Job, str]:
    """A script that `render` wrote and that may have been edited, and its text.

    Raises:
        UserError: it cannot be read, or does not name its run directory.
    """
    try:
        text = script.read_text()
        path = run_dir_of_script(text, ENV_RUN_DIR, os.environ)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UserError(f"--script {script}: {reason}") from error
    except ValueError as error:
        raise UserError(f"--script {script}: write the run directory without $ or ` in the line {error}") from error
    if path is None:
        raise UserError(f"--script {script} has no line `export {ENV_RUN_DIR}=...`: hpc-rl did not render it")
    return Job(kind, JobConfig(), RunDir(Path(path).absolute()), Path.cwd(), command=command), text


def _on_test_partition(request: Request, config: JobConfig) -> JobConfig:
    """The configuration of a trial: the site's partition for tests, and a name of its own."""
    slurm = config.slurm
    name = f"{slurm.job_name}-test" if slurm.job_name else free_name(f"{request.kind}-test")
    if slurm.test_partition and "slurm.partition" not in request.settings:
        config = config.updated("slurm.partition", slurm.test_partition)
    return config.updated("slurm.job_name", name)


def _run_dir(request: Request, config: JobConfig, taken: frozenset[str]) -> Path:
    path = request.run_dir or ROOT / (config.slurm.job_name or free_name(request.kind, taken))
    path = path.absolute()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # the name is too long, or a loop of symbolic links
        raise UserError(f"run directory {str(path)[:200]}: {error.strerror}") from error
    return path
