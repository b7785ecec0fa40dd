"""Nested tables, the form of a configuration before it is validated: read, flatten, set and merge."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.errors import UserError
from hpc_rl.system.files import read_regular

_MOST_BYTES = 2**19
"""Of a YAML file of another user. About 40,000 bytes are read per second."""
MOST_OWN_BYTES = 4_000_000
"""Of a YAML file of this user."""
_MOST_VALUES = 200_000
"""Of a YAML file. One of _MOST_BYTES without aliases has less."""
OF_PLACE = (
    *("slurm.", "container.", "cache.", "ray.", "ray_kwargs."),
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "trainer.hang_timeout_s"),
)
"""Beginnings of keys that the job script contains too. They change neither what a run computes nor how long."""
VALUES = frozenset({"data.train_files"})
"""Keys whose tables are values, because the keys of these tables are not options: names of files contain dots."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also reads 1e-5 as a number."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes every text that the loader would read as a number."""


for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return nested tables as YAML that `compose_yaml` reads back."""
    # ASCII only: PyYAML writes some Unicode line breaks literally and reads them back as spaces.
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120))


class OversizeError(yaml.MarkedYAMLError):
    """A file is small, but its aliases would make very large values of it, or it is nested too deeply."""


def read_yaml(path: Path, named: bool) -> bytes:
    """Read the text of a YAML file.

    Args:
        named: see `open_regular`.

    Raises:
        OSError: it cannot be read, or has more bytes than a file of its owner may have.
    """
    return read_regular(path, _MOST_BYTES, named=named, most_own=MOST_OWN_BYTES)


def compose_yaml(path: Path, named: bool = True) -> tuple[Any, yaml.Node | None]:
    """Read a YAML file into nodes. Every YAML file is read through this function.

    Args:
        named: see `open_regular`.

    Returns:
        the loader, whose construct_document makes values of the nodes, and the nodes; None if the file is empty.

    Raises:
        OSError: see `read_yaml`.
        UnicodeDecodeError, YAMLError: it is not YAML.
    """
    text = io.StringIO(read_yaml(path, named).decode("utf-8"))
    text.name = str(path)  # PyYAML's messages name it
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _count(node, {})
    except RecursionError as error:
        raise OversizeError(problem="it is nested too deeply") from error
    return loader, node


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values of a node, in which those of an alias count wherever it is used.

    Args:
        counts: by identity of a node; 0 while its values are counted.
    """
    known = counts.get(id(node))
    if known == 0:
        raise OversizeError(problem="an alias contains itself", problem_mark=node.start_mark)
    if known is not None:
        return known
    counts[id(node)], total = 0, 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_count(key, counts) + _count(value, counts) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count(one, counts) for one in node.value)
    if total > _MOST_VALUES:
        raise OversizeError(
            problem=f"aliases stand for more than {_MOST_VALUES:,} values", problem_mark=node.start_mark
        )
    counts[id(node)] = total
    return total


def load_yaml(path: Path, named: bool = True) -> Any:
    """Read a YAML file; see `compose_yaml`."""
    loader, node = compose_yaml(path, named)
    try:
        return None if node is None else loader.construct_document(node)
    except RecursionError as error:
        raise OversizeError(problem="it is nested too deeply") from error


def read_tree(path: Path, named: bool = True) -> dict[str, Any]:
    """Read a YAML file of nested tables. Their keys and values are not checked.

    Args:
        named: see `open_regular`.

    Raises:
        UserError: the file is missing, or is not a table in YAML.
    """
    try:
        tree = load_yaml(path, named)
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
        return flat(read_tree(path, named=False))
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


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that differ between two configurations: key -> what it was, and what it is.

    Args:
        before, after: dotted key -> value.
    """
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    return {key: f"{_shown(before, key)} -> {_shown(after, key)}" for key in changed}


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not set"


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
