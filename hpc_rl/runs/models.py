"""The model that a user names by a run, a folder or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.runs.status import ROOT, find_run, is_run


def model_of(target: str, may_come: bool = False) -> str:
    """Return the folder or hub name of a model, as model.path takes it.

    Args:
        target: a model folder, a run directory, the name of a run, a job id, or a name on the hub.
        may_come: whether the run may export its model later.

    Raises:
        UserError: the run has exported no model, or there is no such job.
    """
    if Path(target, "config.json").is_file():
        return target
    if not (target.isdigit() or any(is_run(path) for path in (Path(target), ROOT / target))):
        return target
    run = find_run(target)
    if not may_come and not run.model.is_dir():
        raise UserError(
            f"run {run.name} has no model: {run.model} does not exist. A run exports its model when it completes. "
            f"To export a checkpoint, run hpc-rl export {run.name} FOLDER"
        )
    return str(run.model)
