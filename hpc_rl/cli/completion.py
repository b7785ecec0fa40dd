"""Suggestions for shell completion, which `hpc-rl --install-completion` sets up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin

import typer

Suggestion = tuple[str, str]
"""A word, and its meaning, which bash does not show."""


def run_names(incomplete: str) -> list[str]:
    """Suggest the runs below ./runs. Paths are left to the shell."""
    folder = Path("runs")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]


def site_names(incomplete: str) -> list[str]:
    """Suggest site profiles: the shipped ones, those of ./configs/site, and YAML files."""
    from hpc_rl.config.groups import choices

    names = choices("site")
    return [name for name in names if name.startswith(incomplete)] or list(_files(incomplete, ".yaml"))


def options(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Suggest `key=value` options of the job kind on the command line: keys, or the values of a key.

    bash splits words at `=`, so that the key and `=` are words before the incomplete one; zsh and fish do not.
    """
    from hpc_rl.config.kinds import KINDS

    kind = str(context.params.get("kind") or "")
    if kind not in KINDS:
        return []
    schema = KINDS[kind].schema
    before = [str(word) for name in ("arguments", "words") for word in context.params.get(name) or []]
    if "=" in incomplete:
        key, _, value = incomplete.partition("=")
        return [(f"{key}={found}", meaning) for found, meaning in _values(schema, key, value, files=True)]
    if before and before[-1] == "=":
        before.pop()
    if before and "=" not in before[-1] and (found := _values(schema, before[-1], incomplete, files=False)):
        return found
    return _keys(schema, incomplete)


def sections(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Suggest arguments of `config`: options of the job kind, and names of sections."""
    from hpc_rl.config.kinds import KINDS

    kind = str(context.params.get("kind") or "")
    names = KINDS[kind].schema.model_fields if kind in KINDS else ()
    return [*((name, "") for name in names if name.startswith(incomplete)), *options(context, incomplete)]


def _keys(schema: Any, incomplete: str) -> list[Suggestion]:
    """Suggest keys. If only one matches, its values follow, which also keeps bash from adding a space after `=`."""
    from hpc_rl.config.groups import choices
    from hpc_rl.config.keys import documented_keys

    found = [
        (f"{key}=", shorten(meaning, 70, placeholder="..."))
        for key, _, _, meaning in documented_keys(schema)
        if key.startswith(incomplete)
    ]
    found += [
        (f"{group}=", f"choose a file of configs/{group}")
        for group in _groups(schema)
        if group.startswith(incomplete) and choices(group)
    ]
    if len(found) != 1:
        return found
    key = found[0][0].removesuffix("=")
    return [found[0], *((f"{key}={value}", meaning) for value, meaning in _values(schema, key, "", files=True))]


def _groups(schema: Any) -> list[str]:
    """Return the groups that a job kind can choose from: `site` is an option, and recipes are for ppo."""
    from hpc_rl.config.groups import groups

    return sorted(
        name
        for name in groups()
        if name in schema.model_fields or (name == "recipe" and "reward" in schema.model_fields)
    )


def _values(schema: Any, key: str, incomplete: str, *, files: bool) -> list[Suggestion]:
    """Suggest values of a key.

    Args:
        files: also suggest files for keys with text; without it they are left to the shell.
    """
    from hpc_rl.config.groups import choices
    from hpc_rl.config.keys import documented_keys, find_annotation

    if key in _groups(schema):
        return [(name, "") for name in choices(key) if name.startswith(incomplete)]
    annotation = find_annotation(schema, key)
    if annotation is None:
        return []
    fixed = list(_fixed_values(annotation))
    default = next((text for name, _, text, _ in documented_keys(schema) if name == key), "")
    if not fixed and str not in _plain(annotation) and default not in ("", "required"):
        fixed = [default]
    found = [(value, "the default" if value == default else "") for value in fixed if value.startswith(incomplete)]
    return found + [(path, "") for path in _files(incomplete) if files and str in _plain(annotation)]


def _fixed_values(annotation: Any) -> Iterator[str]:
    """Yield the values that a type lists: those of a Literal, booleans, and null."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) not in (list, dict, tuple):
        for part in get_args(annotation):
            yield from _fixed_values(part)


def _plain(annotation: Any) -> set[Any]:
    from hpc_rl.config.keys import leaf_types

    return set() if get_origin(annotation) is Literal else leaf_types(annotation)


def _files(incomplete: str, suffix: str = "") -> Iterator[str]:
    """Yield files and folders that a path may continue with."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(f"{folder}/" if "/" in incomplete else ".").expanduser()
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return
    for path in entries:
        is_hidden = path.name.startswith(".") and not start
        if path.name.startswith(start) and not is_hidden and (path.is_dir() or not suffix or path.suffix == suffix):
            typed = f"{folder}/" if "/" in incomplete else ""
            yield f"{typed}{path.name}{'/' if path.is_dir() else ''}"
