"""Load an environment and its tools by their names. This imports the user's code, in a process that runs it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hpc_rl.environments.bash_tool import Bash
from hpc_rl.environments.protocol import OWN_METHODS, Definition
from hpc_rl.environments.python_tool import Python
from hpc_rl.environments.schemas import Tool, make_tool
from hpc_rl.errors import UserError
from hpc_rl.software import user_code
from hpc_rl.software.user_code import Location

_FORMS = "package.module:Name or path/file.py:Name"
_LIBRARIES = ("builtins", "typing", "abc", "gym", "gymnasium")
"""Packages whose base classes have public methods that are no tools, also where the user's class overrides them."""
SHIPPED: Mapping[str, type[Python] | type[Bash]] = {"python": Python, "bash": Bash}
"""Name of a shipped tool -> the class that has it as a method."""
ENVIRONMENT, TOOLS = "environment.name", "environment.tools"
"""The options, for errors."""


def check_name(option: str, spec: str, *, same_python: bool) -> str | None:
    """Check on a login node, without importing it, that an environment or a tool exists.

    Args:
        option: ENVIRONMENT or TOOLS.
        same_python: see user_code.find_source.

    Returns:
        a note about what could not be checked here, or None.

    Raises:
        UserError: there is no such file, module or name, or it is neither a class nor a function.
    """
    if option == TOOLS and spec in SHIPPED:
        return None
    where, location = f"{option} {spec}", _location(option, spec)
    source = user_code.find_source(where, location, same_python)
    if source is None:
        return f"{where} is checked when the job starts, because its source is not available here"
    found = user_code.find_statement(where, source, location.name)
    is_class = isinstance(found, ast.ClassDef)
    if isinstance(found, ast.AsyncFunctionDef):
        raise UserError(f"{where} is an async function, which is not called; use a plain function")
    if found is not None and (kind := user_code.literal_kind(found)):
        raise UserError(f"{where} is {kind}, but {_needed(option)}")
    if option == TOOLS and is_class:
        raise UserError(f"{where} is a class, but {_needed(option)}; name an environment in {ENVIRONMENT}")
    return None


def load_definition(
    environment: str | None, kwargs: Mapping[str, Any], tools: Sequence[str] = (), sandbox: str = "auto"
) -> Definition:
    """Load an environment, with its keyword arguments bound, and functions that are tools.

    Args:
        sandbox: for the shipped tools: RUNNER or RUNNER:IMAGE, see Sandbox.

    Raises:
        UserError: one of them is missing, cannot be imported, or is unsuitable; or two tools have the same name.
    """
    functions: dict[str, Tool] = {}
    for spec in tools:
        tool = _shipped_tool(spec, sandbox) if spec in SHIPPED else _load_tool(spec)
        if tool.name in functions:
            raise UserError(f"{TOOLS} {spec}: there is another tool with the name {tool.name}; rename one of them")
        functions[tool.name] = tool
    if environment is None:
        if not functions:
            raise UserError(f"{ENVIRONMENT} and {TOOLS} are both empty: set one of them to the form {_FORMS}")
        return Definition(None, {}, functions)
    return _load_environment(environment, kwargs, functions)


def _load_environment(spec: str, kwargs: Mapping[str, Any], functions: Mapping[str, Tool]) -> Definition:
    where = f"{ENVIRONMENT} {spec}"
    made_by = _load(ENVIRONMENT, spec)
    # A function may create the environment; its methods are then those of the class that it is annotated with.
    cls = made_by if inspect.isclass(made_by) else _returned_class(where, made_by)
    _check_call(where, made_by, kwargs)
    methods = {name: make_tool(where, name, *found) for name, found in _public_methods(cls).items()}
    if both := sorted(methods.keys() & functions.keys()):
        raise UserError(f"{where}: {both[0]} is a method of it and a function in {TOOLS}; rename one of them")
    for name in OWN_METHODS:
        method = getattr(cls, name, None)
        if inspect.iscoroutinefunction(method):
            raise UserError(f"{where}: {name} is an async method, which is not called; use a plain method")
    has_step = callable(getattr(cls, "step", None))
    if not methods and not functions and not has_step:
        raise UserError(
            f"{where} has neither tools nor a method `step`: add public methods with types and docstrings, which are "
            "tools, or step(text) -> (observation, done)"
        )
    if has_step:
        _check_step(where, cls)
    has_reward = callable(getattr(cls, "reward", None))
    return Definition(partial(made_by, **kwargs), methods, functions, has_step, has_reward)


def _shipped_tool(name: str, sandbox: str) -> Tool:
    runner, _, image = sandbox.partition(":")
    return make_tool(f"{TOOLS} {name}", name, getattr(SHIPPED[name](runner, image or None), name))


def _load_tool(spec: str) -> Tool:
    function = _load(TOOLS, spec)
    if inspect.isclass(function):
        raise UserError(f"{TOOLS} {spec} is a class, but {_needed(TOOLS)}; name an environment in {ENVIRONMENT}")
    return make_tool(f"{TOOLS} {spec}", spec.rpartition(":")[2], function)


def _load(option: str, spec: str) -> Any:
    check_name(option, spec, same_python=False)
    where, location = f"{option} {spec}", _location(option, spec)
    module = user_code.import_module(where, location, "_environment")
    found = vars(module).get(location.name)
    if found is None:
        raise UserError(f"{where}: no {location.name!r} in {module.__name__}")
    if not callable(found) or inspect.iscoroutinefunction(found):
        kind = "an async function" if inspect.iscoroutinefunction(found) else type(found).__name__
        raise UserError(f"{where} is {kind}, but {_needed(option)}")
    return found


def _location(option: str, spec: str) -> Location:
    location = user_code.read_location(spec)
    if location is None:
        shipped = f"{' or '.join(SHIPPED)}, or " if option == TOOLS else ""
        raise UserError(f"{option} {spec}: expected {shipped}the form {_FORMS}")
    return location


def _needed(option: str) -> str:
    return (
        "a function is needed" if option == TOOLS else "a class is needed, or a function that returns an object of it"
    )


def _returned_class(where: str, function: Any) -> type:
    try:
        annotation = inspect.signature(function, eval_str=True).return_annotation
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"{where}: its signature cannot be read: {error}") from error
    if not inspect.isclass(annotation) or annotation is inspect.Signature.empty:
        raise UserError(f"{where} is a function without the class that it returns: annotate it, as in -> Calculator")
    return annotation


def _check_call(where: str, made_by: Any, kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(made_by).bind(**kwargs)
    except TypeError as error:
        given = ", ".join(f"{name}=..." for name in kwargs) or "no arguments"
        raise UserError(
            f"{where} is created with {given} (environment.kwargs), which does not fit its parameters: {error}"
        ) from error


def _check_step(where: str, cls: type) -> None:
    try:
        inspect.signature(cls.step).bind(None, "")  # type: ignore[attr-defined]
    except TypeError as error:
        raise UserError(f"{where}: step is called as step(text), which does not fit its parameters: {error}") from error


def _public_methods(cls: type) -> dict[str, tuple[Any, bool]]:
    """Return the public methods that are tools, in the order of their definition, and whether the first parameter of
    each is the object."""
    found: dict[str, tuple[Any, bool]] = {}
    theirs = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in _LIBRARIES]
    no_tools = {*OWN_METHODS, *(name for base in theirs for name in vars(base))}
    for base in reversed(cls.__mro__):
        if base in theirs:
            continue
        for name, value in vars(base).items():
            is_static = isinstance(value, staticmethod)
            is_bound = isinstance(value, classmethod)
            function = value.__func__ if is_static or is_bound else value
            if not name.startswith("_") and name not in no_tools and inspect.isroutine(function):
                found[name] = (function, not is_static)
    return found
