"""What a user has edited in the config.yaml of a run: `submit` keeps it, `requeue` checks and lists it.

hpc-rl keeps what it wrote there itself in a second file. An option that differs between the two is an edit, also after
further attempts, until it is typed as key=value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hpc_rl.config.compose import dump, validate
from hpc_rl.config.job import JobConfig
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.origins import line_in
from hpc_rl.config.tree import OF_PLACE, read_tree
from hpc_rl.errors import UserError
from hpc_rl.images.run_options import job_binds
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import naming_option
from hpc_rl.system.files import read_regular


@dataclass(frozen=True)
class Edit:
    """The value of an option that hpc-rl wrote, and the one that the user wants."""

    written: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{json.dumps(self.written)} -> {json.dumps(self.wanted)}"


def edits(run: RunDir, kind: str) -> dict[str, Edit]:
    """Return the edits of a run: dotted name of an option -> edit. None for a run of another kind or of older files.

    Raises:
        UserError: the edited file is no file of this user's, is not YAML, or does not fit the schema.
    """
    if KINDS[kind].trainer is None or not run.written.is_file() or run.read_job().get("kind", kind) != kind:
        return {}
    if not run.config.exists() or _bytes(run.config) == _bytes(run.written):
        return {}
    try:
        written = _values(_read(kind, run.written))
    except UserError:  # of a version with other options
        return {}
    wanted = _values(_read(kind, run.config))
    return {key: Edit(written[key], wanted[key]) for key in wanted if written[key] != wanted[key]}


def effective_edits(config: JobConfig, found: Mapping[str, Edit]) -> dict[str, Edit]:
    """Return the edits that a new configuration of the run has: those that nobody has typed another value for."""
    values = _values(config)
    return {key: edit for key, edit in found.items() if values[key] == edit.wanted}


def without(config: JobConfig, found: Mapping[str, Edit]) -> str:
    """Return a configuration as YAML without the edits that it has, so that they are found again."""
    for key, edit in effective_edits(config, found).items():
        config = config.updated(key, edit.written)
    return dump(config)


def check_edits(run: RunDir) -> list[str]:
    """Check the edits of a run whose script is used again; list them, one per line.

    Raises:
        UserError: see `edits`; or the script contains the option too, or names the folders of the image.
    """
    kind = str(run.read_job().get("kind"))
    found = edits(run, kind) if kind in KINDS else {}
    if not found:
        return []
    refused = [key for key in found if key.startswith(OF_PLACE)]
    if not refused and _binds(run, kind, run.written) != _binds(run, kind, run.config):
        refused = ["the folders that the image needs"]
    if refused:
        raise UserError(
            f"{run.config} was edited, but {run.script.name} contains {', '.join(refused)} too: submit the run again "
            f"with {naming_option(run)}, which keeps the edits and renders the script, or undo these edits"
        )
    return [f"{run.config} was edited:", *(f"  {key}: {edit}" for key, edit in found.items())]


def edited_since(run: RunDir) -> Path | None:
    """Return the folder of the newest attempt with settings if config.yaml was changed after it, or None."""
    attempt = run.attempt_with_settings()
    if attempt is None or not run.config.is_file():
        return None
    return attempt if _bytes(run.config) != _bytes(attempt / run.config.name) else None


def _binds(run: RunDir, kind: str, file: Path) -> list[str]:
    config = _read(kind, file)
    if config.container.image is None:
        return []
    return job_binds(config, run.path, Path(str(run.read_job().get("working_dir", ""))))


def _read(kind: str, file: Path) -> JobConfig:
    return validate(kind, read_tree(file, named=False), origin=lambda key: line_in(file, key))


def _bytes(file: Path) -> bytes | None:
    """Return what a file of a run contains; None if it cannot be read, as a link, which no job has written."""
    try:
        return read_regular(file)
    except OSError:
        return None


def _values(config: JobConfig) -> dict[str, Any]:
    """Return the value of each option; a table of the user's, such as slurm.env, is one value."""
    return dict(_options(config, config.model_dump(mode="json"), ""))


def _options(config: BaseModel, dumped: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in dumped.items():
        section = getattr(config, name)
        if isinstance(section, BaseModel):
            yield from _options(section, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
