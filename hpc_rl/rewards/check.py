"""Checks of a reward function that do not run it: that it exists, and that its parameters fit.

A login node runs them before it queues the job. They import neither the user's code nor heavy packages.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_rl.errors import UserError
from hpc_rl.rewards import signature
from hpc_rl.rewards.table import REWARDS

_FORMS = "package.module:function or path/file.py:function"


@dataclass(frozen=True)
class FunctionLocation:
    """Where a reward function is defined: in a file, or else in a module."""

    function: str
    file: Path | None = None
    module: str = ""


def locate(spec: str) -> FunctionLocation:
    """Read reward.function.

    Raises:
        UserError: the value is neither a built-in name nor of a valid form; the message suggests the nearest built-in.
    """
    if spec in REWARDS:
        return FunctionLocation("score", module=REWARDS[spec].module)
    where, colon, function = spec.rpartition(":")
    if not colon:
        close = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"reward.function {spec}: expected one of {', '.join(REWARDS)}, or {_FORMS}{hint}")
    if where.endswith(".py") or "/" in where:
        location = FunctionLocation(function, file=Path(where).expanduser())
    else:
        location = FunctionLocation(function, module=where)
    names = [function] if location.file else [function, *where.split(".")]
    if not where or not all(name.isidentifier() for name in names):
        raise UserError(f"reward.function {spec}: expected the form {_FORMS}")
    return location


def check_function(spec: str, kwargs: Mapping[str, Any], *, same_python: bool) -> str | None:
    """Check that a reward function exists and that its parameters fit.

    Args:
        kwargs: reward.kwargs.
        same_python: whether the job runs this Python with this search path, so that a module that is not found here is
            missing there too.

    Returns:
        a note about what could not be checked here, or None.

    Raises:
        UserError: there is no such file, module or function, or it cannot be called as a reward function.
    """
    location = locate(spec)
    if spec == "format" and isinstance(kwargs.get("pattern"), str):
        try:
            re.compile(kwargs["pattern"])
        except re.error as error:
            raise UserError(
                f"reward.kwargs.pattern {kwargs['pattern']!r} is not a regular expression: {error}"
            ) from error
    source = _source(spec, location, same_python)
    if source is None:
        return f"reward.function {spec} is checked when the job starts, because its source is not available here"
    _check_source(spec, source, location.function, kwargs)
    return None


def check_url(url: str) -> None:
    """Raise UserError if reward.url is not the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", url)
        valid = valid and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"reward.url {url}: expected the form http://host:port/path")


def _source(spec: str, location: FunctionLocation, same_python: bool) -> Path | None:
    if spec in REWARDS:
        return Path(__file__).with_name(f"{location.module.rpartition('.')[2]}.py")
    if location.file is None:
        missing, source = _find(location.module)
        if missing and same_python:
            raise UserError(
                f"reward.function {spec}: found no module {missing!r} in {Path.cwd()} or among the installed packages"
            )
        return source
    if not location.file.is_file():
        raise UserError(f"reward.function {spec}: no such file: {location.file}{_near_file(location.file)}")
    return location.file


def _check_source(spec: str, source: Path, function: str, kwargs: Mapping[str, Any]) -> None:
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        at = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        raise UserError(f"reward.function {spec}: {source} cannot be read as Python{at}") from error
    names = dict(_bindings(tree.body))
    found = names.get(function)
    if found is None:
        if "*" in names:
            return
        close = difflib.get_close_matches(function, names, n=1)
        functions = [name for name, node in names.items() if isinstance(node, ast.FunctionDef)]
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(functions) or 'no function'}"
        raise UserError(f"reward.function {spec}: no {function!r} in {source}; {hint}")
    if isinstance(found, ast.AsyncFunctionDef | ast.ClassDef):
        kind = "an async function" if isinstance(found, ast.AsyncFunctionDef) else "a class"
        raise UserError(f"reward.function {spec} is {kind}, but a function is needed: {signature.EXPECTED}")
    if kind := _literal(found):
        raise UserError(f"reward.function {spec} is {kind}, but a function is needed: {signature.EXPECTED}")
    # The result of a decorator, an assignment or an import is only known when the job runs it.
    if isinstance(found, ast.FunctionDef) and not found.decorator_list:
        signature.check(spec, _signature(found.args), kwargs)


def _literal(statement: ast.stmt) -> str | None:
    """Describe the value of an assignment if it is a literal, which cannot be called."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Constant):
        return {str: "text", bool: "a boolean", type(None): "None"}.get(type(value.value), "a number")
    kinds = {
        ast.Dict: "a dictionary",
        ast.List: "a list",
        ast.Tuple: "a tuple",
        ast.Set: "a set",
        ast.JoinedStr: "text",
    }
    return kinds.get(type(value))


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a module's statements bind, each with its statement; "*" for a wildcard import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for _, block in ast.iter_fields(node):
                if isinstance(block, list):
                    inner = [part.body if isinstance(part, ast.ExceptHandler) else [part] for part in block]
                    yield from _bindings([stmt for part in inner for stmt in part if isinstance(stmt, ast.stmt)])


def _signature(arguments: ast.arguments) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    named: list[tuple[str, Any, bool]] = []
    for number, argument in enumerate(positional):
        kind = Parameter.POSITIONAL_ONLY if number < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        named.append((argument.arg, kind, number >= required))
    if arguments.vararg:
        named.append((arguments.vararg.arg, Parameter.VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        named.append((argument.arg, Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        named.append((arguments.kwarg.arg, Parameter.VAR_KEYWORD, False))
    return signature.of_parameters(named)


def _find(module: str) -> tuple[str | None, Path | None]:
    """Find a module's source without importing its packages.

    Returns:
        the part of its name that is missing (None if none is), and its source file (None if it is unknown).
    """
    search: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    origin = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = PathFinder.find_spec(parts[count - 1], search)
        if found is None:
            # An editable installation may be found only through an import hook, which handles top-level names.
            hooks = [hook for hook in sys.meta_path if count == 1 and hook is not PathFinder]
            found = next((spec for hook in hooks if (spec := hook.find_spec(name, None)) is not None), None)
        if found is None:
            return name, None
        search = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if search is None and count < len(parts):
            return ".".join(parts[: count + 1]), None
        origin = found.origin
    return None, Path(origin) if origin is not None and origin.endswith(".py") else None


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""
