"""Variables in values: one rule for profiles, job files, overrides, flags and Python.

In paths, in options that become one line of the script, and in `slurm.env`, `$NAME` and `${NAME}` are variables of the
submitting shell, and `${oc.env:NAME}` and `${oc.env:NAME,default}` are Hydra's form of them, which all other texts have
too. What cannot be replaced is refused. `slurm.setup` and `slurm.epilogue` belong to bash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel

from hpc_rl.config.base import REPLACES_VARIABLES, with_home
from hpc_rl.config.tree import flat, put
from hpc_rl.errors import UserError

_BASH = ("slurm.setup", "slurm.epilogue")
_ENV = "slurm.env."
_HYDRA = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,([^}]*))?\}")
_SHELL = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def resolve(schema: type[BaseModel], tree: dict[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Replace variables in the values of a configuration that is not validated yet.

    Raises:
        UserError: a variable is not set, or `${` is not closed. All are named, a line each.
    """
    problems = []
    for key, value in flat(tree).items():
        replaces = key.startswith(_ENV) or _is_marked(schema, key)
        try:
            found = _each(value, partial(_resolved, key=key, replaces=replaces, environ=environ))
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        if found != value:
            put(tree, key, found)
    if problems:
        raise UserError("\n".join(problems))


def expanded(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a path or a line with its variables replaced.

    Raises:
        ValueError: one is not set here.
    """

    def shell(match: re.Match[str]) -> str:
        return _value(match[1] or match[2], None, environ)

    found = _SHELL.sub(shell, _HYDRA.sub(lambda match: _value(match[1], match[2], environ), text))
    if "${" in found:
        raise ValueError(f"{short(text)!r}: only the forms ${{NAME}} and ${{oc.env:NAME}} are replaced here")
    return found


def expanded_path(path: os.PathLike[str] | str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a path that a user typed, with its variables and `~` replaced.

    Raises:
        ValueError: a variable is not set here, or there is no such home folder.
    """
    return with_home(expanded(os.fspath(path), environ))


def _resolved(text: str, key: str, replaces: bool, environ: Mapping[str, str]) -> str:
    if text.rfind("${") > text.rfind("}"):
        raise ValueError(f"{short(text)!r} has an unfinished `${{`: close it with }}, or leave it out")
    if key in _BASH:
        return text
    if not replaces:
        return _HYDRA.sub(lambda match: _value(match[1], match[2], environ), text)
    try:
        found = expanded(text, environ)
        return with_home(found) if key.startswith(_ENV) and found.startswith("~/") else found
    except ValueError as error:
        if not key.startswith(_ENV):
            raise
        name = key.removeprefix(_ENV)
        raise ValueError(f"{error}; for a value that only the job has, add to slurm.setup: export {name}=...") from None


def _value(name: str, default: str | None, environ: Mapping[str, str]) -> str:
    if name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_CLUSTERS"):
        raise ValueError(f"${name} is set in the job only, and not in the shell that submits it")
    found = environ.get(name, default)
    if found is None:
        raise ValueError(f"${name} is not set in this shell: set it, or write the value itself")
    return found


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """Change a text, the texts of a list, or the names of a table of files."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each(one, change) for one in value]
    return {_each(key, change): one for key, one in value.items()} if isinstance(value, Mapping) else value


def _is_marked(schema: type[BaseModel], key: str) -> bool:
    """Return whether variables are replaced in values of the type of a dotted key."""
    *sections, last = key.split(".")
    owner: Any = schema
    for name in sections:
        field = owner.model_fields.get(name)
        owner = None if field is None else field.annotation
        if not (isinstance(owner, type) and issubclass(owner, BaseModel)):
            return field is not None and _has_mark((owner, *field.metadata))  # a table of lines, such as slurm.sbatch
    field = owner.model_fields.get(last)
    return field is not None and _has_mark((field.annotation, *field.metadata))


def _has_mark(parts: Any) -> bool:
    return any(part is REPLACES_VARIABLES or _has_mark(get_args(part)) for part in parts)


def short(text: str, limit: int = 200) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."
