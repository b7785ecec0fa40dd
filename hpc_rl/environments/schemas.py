"""A tool as the model sees it: its JSON schema, and the check and conversion of the arguments of a call.

The chat template gets the schemas of an environment's tools with the prompt (data/prompts.py) and with each further
turn (turns.py).

The schema has the form that chat templates take (https://huggingface.co/docs/transformers/chat_extras).
`transformers.utils.get_json_schema` is not used: it turns an Enum into "object", refuses docstrings without a
description of each argument, and cannot check the arguments of a call. pydantic does both from one set of types.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict  # pydantic accepts typing's own only from Python 3.12 on

from hpc_rl.errors import UserError

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?|See Also):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_MOST_ERRORS = 5


class BadArguments(Exception):
    """The arguments of a call do not fit the tool. The message is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: dict[str, Any]
    """As chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    """The function, or the method without its object."""
    adapter: TypeAdapter[Any]
    """Checks and converts the arguments."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, converted to the types of the parameters.

        Text that is no value of its parameter's type is read as JSON, because some formats of calls have only text.

        Raises:
            BadArguments: an argument is missing, unknown or of the wrong type.
        """
        try:
            return dict(self.adapter.validate_python(dict(given)))
        except ValidationError as error:
            wrong = {str(part["loc"][0]) for part in error.errors(include_url=False) if part["loc"]}
            decoded = {name: _decoded(value) if name in wrong else value for name, value in given.items()}
        try:
            return dict(self.adapter.validate_python(decoded))
        except ValidationError as error:
            raise BadArguments(self._explain(error)) from error

    def _explain(self, error: ValidationError) -> str:
        found = []
        for part in error.errors(include_url=False, include_context=False)[:_MOST_ERRORS]:
            where = ".".join(map(str, part["loc"]))
            problem = {"missing": "is missing", "extra_forbidden": "is not a parameter"}.get(part["type"])
            found.append(f"{where} {problem}" if problem else f"{where}: {part['msg']}")
        names = ", ".join(self.schema["function"]["parameters"]["properties"])
        return f"{self.name}({names}): {'; '.join(found)}"


def make_tool(where: str, name: str, function: Callable[..., Any], is_method: bool = False) -> Tool:
    """Describe a function or a method as a tool.

    Args:
        where: the option and its value, for the error.
        is_method: whether the first parameter is the object.

    Raises:
        UserError: it has no docstring, a parameter without a type, or one that a call by name cannot give.
    """
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{where}: the tool {name} is an async function, which is not called; use a plain function")
    if not (doc := inspect.getdoc(function)):
        raise UserError(
            f"{where}: the tool {name} has no docstring, which the model needs to see; describe what it does"
        )
    description, about = read_docstring(doc)
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: the types of the tool {name} cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in parameters:
        _check_parameter(where, name, parameter)
        hint = Annotated[hints[parameter.name], Field(description=about.get(parameter.name))]
        fields[parameter.name] = hint if parameter.default is Parameter.empty else NotRequired[hint]
    arguments = TypedDict(name, fields)  # type: ignore[operator]
    arguments.__pydantic_config__ = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=False, use_attribute_docstrings=False
    )
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(arguments)
        schema = adapter.json_schema()
    except PydanticUserError as error:
        problem = error.message.splitlines()[0]
        raise UserError(
            f"{where}: the tool {name} has a parameter of a type that JSON does not have: {problem}"
        ) from error
    schema = plain_schema(schema)
    for parameter in parameters:
        _add_default(schema["properties"][parameter.name], parameter.default)
    body = {"name": name, "description": description, "parameters": schema}
    return Tool(name, {"type": "function", "function": body}, function, adapter)


def _check_parameter(where: str, name: str, parameter: Parameter) -> None:
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD, Parameter.POSITIONAL_ONLY):
        raise UserError(
            f"{where}: the tool {name} has the parameter {str(parameter).partition(':')[0]}, but a call gives every "
            "argument by its name; give it parameters with names"
        )
    if parameter.annotation is Parameter.empty:
        raise UserError(
            f"{where}: the parameter {parameter.name} of the tool {name} has no type, which the model needs to see; "
            f"add one, such as {parameter.name}: str"
        )


def _add_default(schema: dict[str, Any], default: Any) -> None:
    """Add the default of a parameter to its schema if JSON has it."""
    if default is Parameter.empty:
        return
    try:
        schema["default"] = json.loads(json.dumps(getattr(default, "value", default), allow_nan=False))
    except (TypeError, ValueError):
        return


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without titles and with its definitions in place, as models are used to see it."""
    definitions = schema.get("$defs", {})

    def plain(node: Any, seen: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [plain(part, seen) for part in node]
        if not isinstance(node, dict):
            return node
        if len(node.get("allOf", ())) == 1:  # pydantic 2.7, of a definition beside a default
            node = {**node["allOf"][0], **{key: value for key, value in node.items() if key != "allOf"}}
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in definitions:
            # A type that contains itself ends here.
            inner = {"type": "object"} if name in seen else plain(definitions[name], (*seen, name))
            return {**inner, **{key: value for key, value in node.items() if key != "$ref"}}
        kept = {key: value for key, value in node.items() if key not in ("title", "$defs")}
        return {
            key: {each: plain(part, seen) for each, part in value.items()}
            if key == "properties"
            else value
            if key in ("enum", "const", "default")
            else plain(value, seen)
            for key, value in kept.items()
        }

    return dict(plain(schema, ()))


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring in Google's style into the description and the text about each argument.

    The style: https://google.github.io/styleguide/pyguide.html#383-functions-and-methods
    """
    description: list[str] = []
    about: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in inspect.cleandoc(doc).splitlines():
        if found := _SECTION.match(line):
            section, indent, current = found[1], 0, ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            named = _ARGUMENT.match(line.strip()) if depth <= indent else None
            if named:
                current = named[1]
            if current:
                about.setdefault(current, []).append(named[2] if named else line.strip())
    return "\n".join(description).strip(), {name: " ".join(filter(None, lines)) for name, lines in about.items()}
