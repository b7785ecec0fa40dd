"""From a request, typed on the command line or made in Python, to the job that it describes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.adapters.launchers import without_launcher
from hpc_rl.adapters.prefixes import plain
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.table import choose, started
from hpc_rl.config.compose import FillIn, compose, load_config
from hpc_rl.config.job import JobConfig
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.references import expanded_path
from hpc_rl.errors import UserError
from hpc_rl.run_dir import ENV_RUN_DIR, RunDir
from hpc_rl.runs.folders import ROOT
from hpc_rl.runs.models import models_of_runs
from hpc_rl.sites.profile import load_profile
from hpc_rl.slurm.commands import NodeListing
from hpc_rl.slurm.place import here
from hpc_rl.slurm.states import run_dir_of_script
from hpc_rl.submission import queue
from hpc_rl.submission.devices import Devices
from hpc_rl.submission.edits import edits
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import has_own_settings
from hpc_rl.submission.series.after import find_after
from hpc_rl.system.ownership import trust_group

_PROGRAMS = ("hpc-rl", "__main__.py")
"""File names of what runs as hpc-rl."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class JobRequest:
    """A user's request: the arguments of `hpc-rl submit` and `hpc-rl render`, or of `hpc_rl.submit`."""

    kind: str
    """Name of a row of KINDS."""
    overrides: Sequence[str] = ()
    """key=value, as typed."""
    program: tuple[str, ...] = ()
    """The user's own program and its arguments, if the kind takes one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value, from flags such as --nodes."""
    after: str | None = None
    """A job id, a run or a sweep that has to complete first."""
    run_dir: Path | None = None
    site: str | None = None
    """File or name of a site profile; it takes precedence over the profiles that are found by default."""
    local: bool = False
    """Whether the job runs on this machine, without Slurm."""
    is_test: bool = False
    """Whether this is the short trial of `submit --test`."""
    fewest_nodes: bool = False
    """Whether the job gets the fewest nodes on which it fits."""
    force: bool = False
    """Whether to submit a job that does not fit into the memory of its GPUs."""
    command: tuple[str, ...] = ()
    """The command line, for job.json."""

    @property
    def typed(self) -> tuple[str, ...]:
        """The command as a user types it; empty if it was no command, or one of several stages."""
        is_typed = bool(self.command) and Path(self.command[0]).name in _PROGRAMS and self.command[1:2] != ("chain",)
        return ("hpc-rl", *self.command[1:]) if is_typed else ()

    def trust_its_group(self) -> None:
        """Accept files in the working folder of the group that the overrides name, as those of a profile's group."""
        for word in self.overrides:
            if word.startswith("slurm.group="):
                trust_group(word.partition("=")[2])


def plan(request: JobRequest, taken: frozenset[str] = frozenset(), nodes: NodeListing | None = None) -> Job:
    """Plan the job that a request describes: compose its configuration and name it. Changes nothing.

    A job without a name gets the first free name of sft-1, sft-2 and so on, so that a dry run shows exactly the script
    that would be submitted.

    Args:
        taken: names that other jobs of the same command will have.
        nodes: the nodes of the cluster, if other jobs of the same command need them too.

    Raises:
        UserError: the configuration is invalid, or the job to wait for does not exist.
    """
    if request.is_test and request.run_dir is not None:
        raise UserError("--test creates its own run directory: leave out --run-dir")
    if request.program and not KINDS[request.kind].takes_program:
        takers = " and ".join(row.name for row in KINDS.values() if row.takes_program)
        raise UserError(
            f"-- {request.program[0]}: {request.kind} runs hpc-rl's own trainer; "
            f"only {takers} accept a program after --"
        )
    devices = Devices(request.local, nodes)
    on_test_partition = request.is_test and "slurm.partition" not in request.settings
    models = models_of_runs(may_come=request.after is not None)
    edited = [] if request.is_test else [partial(_edits, request)]
    fill_in: list[FillIn] = [models, *edited, *([_choose_test_partition] if on_test_partition else []), devices.fill_in]
    request.trust_its_group()
    site = load_profile(request.site).values
    config = compose(request.kind, request.overrides, request.settings, site, fill_in, request.typed)
    return job_of(request, config, taken, devices)


def job_of(request: JobRequest, config: JobConfig, taken: frozenset[str], devices: Devices) -> Job:
    """Return the job of a request whose configuration is already composed.

    Args:
        devices: what was chosen by the hardware of the nodes.

    Raises:
        UserError: its name is invalid, the job to wait for does not exist, or slurm.adapter is not for its program.
    """
    name = config.slurm.job_name
    if name is not None and not _NAME.fullmatch(name):
        raise UserError(
            f"job name {name!r}: use letters, digits, '.', '_' and '-', and begin with a letter, a digit or '_'"
        )
    after = None if request.after is None else find_after(request.after, here(os.environ, config.slurm.clusters))
    if after is not None and "dependency" in config.slurm.sbatch:
        raise UserError("--after and --sbatch dependency=... set the same option of sbatch: use only one of them")
    stem, is_named = name or request.kind, request.run_dir is not None or name is not None
    if request.is_test:  # never in the run directory of the run that it tries
        stem, is_named, config = f"{stem}-test", False, config.updated("slurm.job_name", None)
    path = typed_run_dir(request) or ROOT / (stem if is_named else free_name(stem, taken))
    run_dir = RunDir(_possible(path.absolute()))
    typed = Program(request.program)
    if request.kind == "torchrun":
        typed = without_launcher(plain(typed))
    adapter = choose(config.slurm.adapter, request.kind, typed)
    return Job(
        request.kind, config, run_dir, Path.cwd(), started(adapter, typed), after, request.command, is_named,
        nodes=devices.nodes, note=devices.note, typed=request.program,
    )  # fmt: skip


def typed_run_dir(request: JobRequest) -> Path | None:
    """Return the run directory that the user has chosen, with variables and `~` replaced as in the configuration.

    Raises:
        UserError: a variable is not set.
    """
    if request.run_dir is None:
        return None
    try:
        return Path(expanded_path(request.run_dir))
    except ValueError as error:
        raise UserError(f"--run-dir: {error}") from error


def reserve(job: Job) -> Job:
    """Create the run directory of a planned job.

    A job without a name gets the next free name if another submission was faster.
    """
    while not (job.is_named or queue.reserve(job.run_dir.path)):
        stem = job.run_dir.name.rpartition("-")[0]
        job = replace(job, run_dir=RunDir((ROOT / free_name(stem)).absolute()))
    return job


def free_name(stem: str, taken: frozenset[str] = frozenset()) -> str:
    """Return the first of stem-1, stem-2 and so on that no run has."""
    number = 1
    while (ROOT / f"{stem}-{number}").exists() or f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def job_of_script(kind: str, script: Path, command: tuple[str, ...] = ()) -> tuple[Job, str]:
    """Read a script that `render` wrote and that may have been edited; return its job and its text.

    Raises:
        UserError: the script cannot be read, or does not name its run directory; or the settings there are invalid.
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
        raise UserError(f"--script {script} has no line `export {ENV_RUN_DIR}=...`: hpc-rl render did not write it")
    run = RunDir(Path(path).absolute())
    if KINDS[kind].trainer is not None and not has_own_settings(text):
        load_config(kind, run.config)
    return Job(kind, JobConfig(), run, Path.cwd(), command=command), text


def _choose_test_partition(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the site's partition for trials, if it has one."""
    slurm = tree.get("slurm")
    partition = slurm.get("test_partition") if isinstance(slurm, Mapping) else None
    return {"slurm.partition": partition} if partition else {}


def _edits(request: JobRequest, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the edits of config.yaml of a run that is submitted again, except for keys that the request names.

    Raises:
        UserError: others could have written the file, or it is invalid.
    """
    slurm = tree.get("slurm")
    slurm = slurm if isinstance(slurm, Mapping) else {}
    folder = typed_run_dir(request) or (ROOT / str(slurm["job_name"]) if slurm.get("job_name") else None)
    if folder is None or not folder.is_dir():
        return {}
    run = RunDir(folder.absolute())
    run.check_owner(slurm.get("group"))
    named = {word.partition("=")[0].lstrip("+") for word in request.overrides} | request.settings.keys()
    return {key: edit.wanted for key, edit in edits(run, request.kind).items() if key not in named}


def _possible(path: Path) -> Path:
    """Return the path, or raise UserError if no file can exist there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # the name is too long, or a loop of symbolic links
        raise UserError(f"run directory {str(path)[:200]}: {error.strerror}") from error
    return path
