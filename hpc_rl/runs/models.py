"""The model that a user names by a run, a folder or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hpc_rl.config.base import possible_path
from hpc_rl.config.tree import flat
from hpc_rl.errors import UserError
from hpc_rl.runs.finding import find_run
from hpc_rl.runs.folders import ROOT, is_run, runs_below

MODEL_KEYS = (
    *("model.path", "model.tokenizer_path", "model.lora.path"),
    *("ref.path", "teacher.path", "critic.path", "reward.model"),
)
"""Options that name a model."""


def models_of_runs(may_come: bool) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """Return what replaces the names of runs in a configuration by the folders of their models; see `compose`.

    Args:
        may_come: whether a run may export its model later.
    """

    def fill_in(tree: Mapping[str, Any]) -> dict[str, str]:
        named = flat(tree)
        return {
            key: found
            for key in MODEL_KEYS
            if isinstance(name := named.get(key), str) and (found := model_for(key, name, may_come)) != name
        }

    return fill_in


def model_for(key: str, name: str, may_come: bool) -> str:
    """Return the folder of a run's model, or the name as it is if it names no run. See `model_of`."""
    try:
        folder = Path(possible_path(name))
    except ValueError:
        return name  # a later check reports what is wrong with it
    if not name or (folder.is_dir() and not is_run(folder)):
        return name  # whether it is a model is checked later
    try:
        return model_of(name, may_come)
    except UserError as error:
        raise UserError(f"{key} {name}: {error}") from error


def model_of(target: str, may_come: bool = False) -> str:
    """Return the folder or hub name of a model, as model.path takes it.

    Args:
        target: a model folder, a run directory, the name of a run, a job id, or a name on the hub.
        may_come: whether the run may export its model later.

    Raises:
        UserError: the run has exported no model, or there is no such run, job or model.
    """
    if Path(target, "config.json").is_file():
        return target
    if not (target.isdigit() or any(is_run(path) for path in (Path(target), ROOT / target))):
        if Path(target).is_dir():
            raise UserError(
                f"{target} is a folder without config.json, and not a run: name a run, or the folder of a model"
            )
        _refuse_mistyped_run(target)
        return target
    run = find_run(target)
    if not may_come and not run.model.is_dir():
        raise UserError(
            f"run {run.name} has no model: {run.model} does not exist. A run exports its model when it completes. "
            f"To export a checkpoint, run hpc-rl export {run.name} FOLDER"
        )
    return str(run.model)


def _refuse_mistyped_run(target: str) -> None:
    """Raise UserError if a name has the form of a run's and is almost that of one: it is none on the hub."""
    if re.fullmatch(r"[\w.-]+-\d+", target) is None or not ROOT.is_dir():
        return
    runs = [path.name for path in runs_below(ROOT) if is_run(path)]
    if similar := get_close_matches(target, runs, n=3, cutoff=0.7):
        raise UserError(f"no run {target} in {ROOT.absolute()}; did you mean {' or '.join(sorted(similar))}?")
