"""What can be known of a reward function without running it: that it is there, and how it is called.

Light on purpose: a login node checks this before it queues the job, and imports nothing of the user's.
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

BUILT_IN = ("exact", "format", "gsm8k", "math")

_FORMS = "package.module:function or path/file.py:function"


@dataclass(frozen=True)
class Place:
    """Where a reward function is: in a file or in a module, one of them."""

    function: str
    file: Path | None = None
    module: str = ""


def place_of(spec: str) -> Place:
    """Read reward.function.

    Raises:
        UserError: neither a built-in name nor one of the forms; names the nearest built-in.
    """
    if spec in BUILT_IN:
        return Place("score", module=f"hpc_rl.rewards.{spec}")
    where, colon, function = spec.rpartition(":")
    if not colon:
        close = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"reward.function {spec}: neither one of {', '.join(BUILT_IN)} nor {_FORMS}{hint}")
    if where.endswith(".py") or "/" in where:
        place = Place(function, file=Path(where).expanduser())
    else:
        place = Place(function, module=where)
    names = [function] if place.file else [function, *where.split(".")]
    if not where or not all(name.isidentifier() for name in names):
        raise UserError(f"reward.function {spec}: not of the form {_FORMS}")
    return place


def check_function(spec: str, kwargs: Mapping[str, Any], *, same_python: bool) -> str | None:
    """Look for a reward function and at its parameters.

    Args:
        kwargs: reward.kwargs.
        same_python: the job runs this Python with this search path, so a module that is not found is missing.

    Returns:
        what could not be checked here, if anything.

    Raises:
        UserError: no such file, module or function (with the nearest name), or not callable as a reward function.
    """
    place = place_of(spec)
    if spec == "format" and isinstance(kwargs.get("pattern"), str):
        try:
            re.compile(kwargs["pattern"])
        except re.error as error:
            raise UserError(f"reward.kwargs.pattern {kwargs['pattern']!r} is no regular expression: {error}") from error
    source = _source(spec, place, same_python)
    if source is None:
        return f"reward.function {spec} is looked up when the job starts: its source is not found here"
    _check_source(spec, source, place.function, kwargs)
    return None


def check_url(url: str) -> None:
    """Raises UserError where reward.url is no address of an HTTP server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", url)
        valid = valid and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"reward.url {url}: not of the form http://host:port/path")


def _source(spec: str, place: Place, same_python: bool) -> Path | None:
    if spec in BUILT_IN:
        return Path(__file__).with_name(f"{spec}.py")
    if place.file is None:
        missing, source = _find(place.module)
        if missing and same_python:
            raise UserError(f"reward.function {spec}: no module {missing!r} in {Path.cwd()} or among what is installed")
        return source
    if not place.file.is_file():
        raise UserError(f"reward.function {spec}: no such file: {place.file}{_near_file(place.file)}")
    return place.file


def _check_source(spec: str, source: Path, function: str, kwargs: Mapping[str, Any]) -> None:
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        at = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        raise UserError(f"reward.function {spec}: {source} is not readable as Python{at}") from error
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
        raise UserError(f"reward.function {spec} is {kind}, where a function is needed: {signature.EXPECTED}")
    # What a decorator, an assignment or an import makes of it shows only when the job starts.
    if isinstance(found, ast.FunctionDef) and not found.decorator_list:
        signature.check(spec, _signature(found.args), kwargs)


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module's statements bind, with the statement; "*" for an import of everything."""
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
    """Look for a module's source without importing its packages.

    Returns:
        the part of its name that is missing (None: nothing is), and its source file (None: unknown).
    """
    search: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    origin = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = PathFinder.find_spec(parts[count - 1], search)
        if found is None:
            # A package in development may be found by an import hook alone, which knows its top level.
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
