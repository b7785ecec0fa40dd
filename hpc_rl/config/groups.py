"""Job files and groups: the YAML files below `configs/` that Hydra composes, the user's own and the shipped ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.software.shipped import shipped
from hpc_rl.system.ownership import refuse_foreign


def folders() -> list[Path]:
    """Return the folders with job files and groups: ./configs, if there is one, before the shipped one."""
    own = Path.cwd() / "configs"
    return [own, shipped("configs")] if own.is_dir() and own != shipped("configs") else [shipped("configs")]


def check_own(path: Path) -> None:
    """Refuse a file of ./configs that another user may have written.

    Raises:
        UserError: it is not this user's or root's, or others could change or replace it.
    """
    if not path.is_relative_to(shipped("configs")):
        refuse_foreign(str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path), path)


def groups() -> set[str]:
    """Return the names of the groups: recipe, model, algorithm, and any of the user's own."""
    return {path.name for folder in folders() for path in folder.iterdir() if path.is_dir()}


def choices(group: str) -> list[str]:
    """Return the names that can be chosen from a group."""
    return sorted({path.stem for folder in folders() for path in (folder / group).glob("*.yaml")})


def recipe_for(nodes: int) -> str | None:
    """Return the first recipe for a number of nodes, if there is one."""
    for name in choices("recipe"):
        trainer = _load(file_of("recipe", name)).get("trainer")
        if isinstance(trainer, dict) and trainer.get("nnodes") == nodes:
            return name
    return None


def path_of_choice(group: str, name: str) -> str | None:
    """Return the key `path` of a file of a group, None if there is no such file or it has none.

    A file that sets options of other sections too (`# @package _global_`) has a section named like the group.
    """
    if name not in choices(group):
        return None
    found = _load(file_of(group, name))
    section = found.get(group)
    path = section.get("path") if isinstance(section, dict) else found.get("path")
    return path if isinstance(path, str) else None


def check_choices(overrides: Sequence[str], instead: dict[str, str]) -> None:
    """Check that every `group=name` among the overrides names a file.

    Args:
        instead: group -> key that takes a value of the user's own, such as model -> model.path.

    Raises:
        UserError: a name does not exist; the message lists the choices.
    """
    known, problems = groups(), []
    for override in overrides:
        group, _, name = override.lstrip("+").partition("=")
        if group not in known or name.startswith("[") or file_of(group, name).is_file():
            continue
        names = choices(group)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {group}={close[0]}?" if close else ""
        if group in instead and not hint:
            hint = f"; for any other write {instead[group]}={name if name not in ('', 'null') else 'FOLDER_OR_NAME'}"
        found = f"there is no {group} {name!r}" if name not in ("", "null") else "no name is given"
        problems.append(f"{group}={name}: {found}; choose one of {', '.join(names)}{hint}")
    if problems:
        raise UserError("\n".join(problems))


def file_of(group: str, name: str) -> Path:
    """Return the file of a group; a path that does not exist if there is none."""
    found = [folder / group / f"{name}.yaml" for folder in folders()]
    try:
        return next((path for path in found if path.is_file()), found[-1])
    except OSError:  # the name is too long
        return found[-1].with_name("none")


def _load(path: Path) -> dict[str, Any]:
    """Read a YAML file; an empty table if it cannot be read, which Hydra reports."""
    import yaml

    from hpc_rl.config.tree import load_yaml

    if path.is_file():
        check_own(path)
    try:
        document = load_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}
