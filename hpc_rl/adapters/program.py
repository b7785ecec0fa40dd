"""A user's program as its command line shows it: module, script, options, settings files, imports. Nothing is run."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

MOST_BYTES = 2**20
"""Of a script or a settings file that is read."""
MOST_FILES = 30
"""Modules beside the script whose imports are followed."""
LAUNCHED = "hpc_rl.adapters.inside.launched"
"""Module of ours that runs a program as its launcher would. The program follows after `--`."""
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_HYDRA = re.compile(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_YAML_LINE = re.compile(r"( *)([A-Za-z_][\w.-]*):(?:\s(.*))?")


@dataclass(frozen=True)
class Program:
    """The words after `--`."""

    words: tuple[str, ...]
    folder: Path = field(default_factory=Path.cwd)
    """Folder that relative paths refer to."""

    @cached_property
    def command(self) -> tuple[str, ...]:
        """The words without Python, its flags, and what stands for a launcher."""
        words = self.words
        if words[:2] == ("-m", LAUNCHED) and "--" in words:
            return words[words.index("--") + 1 :]
        if words and _PYTHON.fullmatch(words[0]):
            words = words[1:]
            while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
                words = words[2 if words[0] in ("-W", "-X") else 1 :]
        return words

    @property
    def runs_in_job_python(self) -> bool:
        """Whether the Python of the job runs it, and no other one that the command names."""
        return self.words[:1] == self.command[:1] or "/" not in self.words[0]

    @property
    def module(self) -> str:
        """The module after -m; empty if there is none."""
        return self.command[1] if self.command[:1] == ("-m",) and len(self.command) > 1 else ""

    @property
    def name(self) -> str:
        """The script or the command; empty for a module."""
        return "" if self.module or not self.command else self.command[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows the script or the module."""
        return self.command[2 if self.module else 1 :]

    @cached_property
    def options(self) -> Mapping[str, str]:
        """Option -> value, the last one if there are several: `--name value`, `--name=value`, `name=value` (Hydra).

        Flags without a value have an empty one. `-` in the names of flags is `_`.
        """
        found, words = {}, self.arguments
        for number, word in enumerate(words):
            if flag := _FLAG.fullmatch(word):
                name, value = flag[1].replace("-", "_"), flag[2]
                following = words[number + 1] if number + 1 < len(words) else "--end"
                found[name] = (
                    value
                    if value is not None
                    else ""
                    if following.startswith("--") or _FLAG.fullmatch(following)
                    else following
                )
            elif pair := _HYDRA.fullmatch(word):
                found[pair[1]] = pair[2]
        return found

    @property
    def positional(self) -> tuple[str, ...]:
        """The leading arguments that are no options."""
        words = self.arguments
        end = next((n for n, word in enumerate(words) if _FLAG.fullmatch(word) or _HYDRA.fullmatch(word)), len(words))
        return words[:end]

    def settings(self, *names: str) -> Mapping[str, str]:
        """Return the settings of the files that these options name, or that are arguments: dotted key -> value.

        Args:
            names: options such as `config`. A file name with .yaml, .yml, .json or .toml among the leading arguments
                counts too.
        """
        files = [self.options[name] for name in names if self.options.get(name)]
        files += [word.removeprefix("@") for word in self.positional]
        found: dict[str, str] = {}
        for file in files:
            found |= self.read(self.folder / file)
        return found

    @cached_property
    def read(self) -> Callable[[Path], Mapping[str, str]]:
        """Reads a settings file, once: while a program runs, its user may edit them for the next one."""
        return cache(read_settings)

    @cached_property
    def imports(self) -> frozenset[str]:
        """Modules and names that the script imports, and modules beside it, such as `trl` and `trl.SFTTrainer`."""
        script = self.folder / (self.name or f"{self.module.replace('.', '/')}.py")
        return frozenset(_imports(script)) if script.suffix == ".py" else frozenset()

    def runs(self, *modules: str) -> bool:
        """Return whether the program is one of these modules or a part of one, after -m."""
        return any(self.module == module or self.module.startswith(f"{module}.") for module in modules)

    def uses(self, *modules: str) -> bool:
        """Return whether the program is one of these modules or a part of one, or imports one of these names."""
        ran = (self.module, *self.imports)
        return any(name == module or name.startswith(f"{module}.") for name in ran for module in modules)


def read_settings(file: Path) -> Mapping[str, str]:
    """Return the scalars of a YAML, JSON or TOML file: dotted key -> value; empty if it cannot be read.

    Of YAML, only plain mappings are read. Lists and multi-line texts are left out.
    """
    try:
        text = _beginning(file).decode() if file.suffix in (".yaml", ".yml", ".json", ".toml") else ""
        if file.suffix == ".toml":
            return dict(_flat(tomllib.loads(text)))
        if file.suffix == ".json":
            return dict(_flat(json.loads(text or "{}")))
    except (OSError, ValueError, RecursionError):
        return {}
    found, above = {}, list[tuple[int, str]]()
    for line in text.splitlines():
        if (match := _YAML_LINE.fullmatch(line)) is None:
            continue
        indent, key, value = len(match[1]), match[2], f" {match[3] or ''}".partition(" #")[0].strip()
        while above and above[-1][0] >= indent:
            above.pop()
        if not value:
            above.append((indent, key))
        else:
            found[".".join([*(name for _, name in above), key])] = value.strip("'\"")
    return found


def _beginning(file: Path) -> bytes:
    """Return what is read of a file: not more, however large it is, and nothing if it is no regular file."""
    if not file.is_file():
        return b""
    with file.open("rb") as text:
        return text.read(MOST_BYTES)


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, str | int | float):
            yield f"{above}{key}", str(value)


def _imports(script: Path) -> Iterator[str]:
    waiting, seen = [script], {script}
    while waiting and len(seen) <= MOST_FILES:
        file = waiting.pop(0)
        for name in imported_names(file):
            yield name
            beside = script.parent / name.replace(".", "/")
            for own in (beside.with_suffix(".py"), beside / "__init__.py"):
                if own not in seen and own.is_file():
                    seen.add(own)
                    waiting.append(own)


def imported_names(file: Path) -> list[str]:
    """Return the modules that a Python file imports, also `module.name` of `from module import name`."""
    try:
        tree = ast.parse(_beginning(file))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level <= 1:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found
