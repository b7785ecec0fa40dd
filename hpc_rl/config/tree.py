"""Nested tables, the form of a configuration before it is validated: read, flatten, set and merge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.errors import UserError

VALUES = frozenset({"data.train_files"})
"""Keys whose tables are values, because the keys of these tables are not options: names of files contain dots."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also reads 1e-5 as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML file of nested tables. Their keys and values are not checked.

    Raises:
        UserError: the file is missing, or is not a table in YAML.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"no configuration at {path}: {error.strerror or 'it cannot be read'}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a table of options")
    return tree


def read_options(path: Path) -> dict[str, Any]:
    """Return dotted key -> value of a run's config.yaml; empty if there is none, or it cannot be read."""
    try:
        return flat(read_tree(path))
    except UserError:
        return {}


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value for nested tables; lists, empty tables and those of `VALUES` are values."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in VALUES:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables.

    Raises:
        UserError: a part of the key is a value, not a table.
    """
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, 1):
        child = tree.get(parent)
        if child is None:
            child = tree[parent] = {}
        elif not isinstance(child, dict):
            section = ".".join(parents[:depth])
            raise UserError(f"{section} is a section with keys such as {key}; found {section}={child!r}")
        tree = child
    tree[last] = value


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables key by key; values of `above` take precedence, and lists are not joined."""
    tables = {key for key in below.keys() & above.keys() if isinstance(below[key], dict)}
    both = {key: merged(below[key], above[key]) for key in tables if isinstance(above[key], dict)}
    return {**below, **above, **both}
