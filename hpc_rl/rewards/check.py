"""Checks of a reward function that do not run it: that it exists, and that its parameters fit.

A login node runs them before it queues the job. They import neither the user's code nor heavy packages.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_rl.errors import UserError
from hpc_rl.rewards import signature
from hpc_rl.rewards.table import REWARDS
from hpc_rl.software import user_code
from hpc_rl.software.user_code import Location

_FORMS = "package.module:function or path/file.py:function"


def locate(spec: str) -> Location:
    """Read reward.function.

    Raises:
        UserError: the value is neither a built-in name nor of a valid form; the message suggests the nearest built-in.
    """
    if spec in REWARDS:
        return Location("score", module=REWARDS[spec].module)
    if ":" not in spec:
        close = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"reward.function {spec}: expected one of {', '.join(REWARDS)}, or {_FORMS}{hint}")
    location = user_code.read_location(spec)
    if location is None:
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
    _check_source(spec, source, location.name, kwargs)
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


def _source(spec: str, location: Location, same_python: bool) -> Path | None:
    if spec in REWARDS:
        return Path(__file__).with_name(f"{location.module.rpartition('.')[2]}.py")
    return user_code.find_source(f"reward.function {spec}", location, same_python)


def _check_source(spec: str, source: Path, function: str, kwargs: Mapping[str, Any]) -> None:
    found = user_code.find_statement(f"reward.function {spec}", source, function)
    if found is None:
        return
    if isinstance(found, ast.AsyncFunctionDef | ast.ClassDef):
        kind = "an async function" if isinstance(found, ast.AsyncFunctionDef) else "a class"
        raise UserError(f"reward.function {spec} is {kind}, but a function is needed: {signature.EXPECTED}")
    if kind := user_code.literal_kind(found):
        raise UserError(f"reward.function {spec} is {kind}, but a function is needed: {signature.EXPECTED}")
    # The result of a decorator, an assignment or an import is only known when the job runs it.
    if isinstance(found, ast.FunctionDef) and not found.decorator_list:
        signature.check(spec, _signature(found.args), kwargs)


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
