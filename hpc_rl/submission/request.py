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
from hpc_rl.config.kinds import KINDS
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
    if request.is_test and request.run_dir is not None:
        raise UserError("--test makes a run directory of its own: leave out --run-dir")
    if request.program and not KINDS[request.kind].takes_program:
        takers = " and ".join(row.name for row in KINDS.values() if row.takes_program)
        raise UserError(
            f"-- {request.program[0]}: {request.kind} runs a program of hpc-rl's own; {takers} take one after --"
        )
    devices = Devices(request.local)

    def fill_in(tree: Mapping[str, Any]) -> Mapping[str, Any]:
        moved = _test_partition(request, tree)
        slurm = {**tree.get("slurm", {}), **({"partition": moved} if moved else {})}
        return {**devices.fill_in({**tree, "slurm": slurm}), **({"slurm.partition": moved} if moved else {})}

    site = load_profile(request.site).values
    config = compose(request.kind, request.overrides, request.settings, site, fill_in)
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
    if request.is_test:
        config = config.updated("slurm.job_name", None)  # the run directory's
    return Job(request.kind, config, run_dir, Path.cwd(), request.program, after, request.command, note)


def reserve(request: Request, job: Job) -> Job:
    """Make the run directory of a planned job.

    A job without a name takes the next free one if another submission was faster.
    """
    while not (_is_named(request, job.config) or queue.reserve(job.run_dir.path)):
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


def _test_partition(request: Request, tree: Mapping[str, Any]) -> str | None:
    """The site's partition for trials, if this is a trial and no flag names another partition."""
    found = tree.get("slurm", {}).get("test_partition") if request.is_test else None
    return None if "slurm.partition" in request.settings else found


def _is_named(request: Request, config: JobConfig) -> bool:
    """Whether the user chose the run directory. A trial never uses that of the run that it tries."""
    return not request.is_test and (request.run_dir is not None or config.slurm.job_name is not None)


def _run_dir(request: Request, config: JobConfig, taken: frozenset[str]) -> Path:
    if request.is_test:
        name = free_name(f"{config.slurm.job_name or request.kind}-test", taken)
    else:
        name = config.slurm.job_name or free_name(request.kind, taken)
    path = (request.run_dir or ROOT / name).absolute()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # the name is too long, or a loop of symbolic links
        raise UserError(f"run directory {str(path)[:200]}: {error.strerror}") from error
    return path
