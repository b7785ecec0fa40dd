"""The line of a file below `configs/` that sets a key: for messages about a mistake in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config.groups import groups
from hpc_rl.config.tree import compose_yaml


def origins(job: str, overrides: Sequence[str] = ()) -> Callable[[str], str]:
    """Return a function from a dotted key to `FILE, line N: ` for the line that sets it, or an empty text if none does.

    Args:
        overrides: words of the command line, with which the configuration has been composed. A key that one of them
            sets has no line.
    """

    @functools.cache
    def files() -> list[tuple[Path, str]]:
        from hpc_rl.config.hydra_files import composed_files

        return composed_files(job, [word for word in overrides if _key(word) in groups()])

    def origin(key: str) -> str:
        typed = {_key(word) for word in overrides} - groups()
        if any(_is_same_or_above(word, key) or _is_same_or_above(key, word) for word in typed):
            return ""
        for path, section in reversed(files()):
            if found := line_in(path, key.removeprefix(section) if key.startswith(section) else ""):
                return found
        return ""

    return origin


def line_in(path: Path, key: str) -> str:
    """Return `FILE, line N: ` for a dotted key of a YAML file, or the list that an element is in; or an empty text."""
    lines = dict(_lines(path))
    while key not in lines and key.rpartition(".")[2].isdigit():
        key = key.rpartition(".")[0]
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {lines[key]}: " if key in lines else ""


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (dotted key, line) of a YAML file; nothing if it cannot be read."""
    import yaml

    try:
        _, document = compose_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    yield from _keys(document, "")


def _keys(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _keys(value, f"{prefix}{name.value}.")


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _is_same_or_above(key: str, other: str) -> bool:
    return f"{other}.".startswith(f"{key}.")
