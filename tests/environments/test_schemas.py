from __future__ import annotations

import enum
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.environments.schemas import BadArguments, Tool, make_tool, read_docstring


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


def weather(
    city: str,
    days: int = 1,
    unit: Unit = Unit.CELSIUS,
    kind: Literal["short", "long"] | None = None,
    places: list[str] | None = None,
    limits: dict[str, float] | None = None,
    exact: bool = False,
) -> str:
    """Report the weather.

    It may be wrong.

    Args:
        city: Name of the city,
            with the country.
        days (int): Number of days.
        unit: Unit of temperatures.
    Returns:
        text: a report
    """
    return ""


@pytest.fixture(scope="module")
def tool() -> Tool:
    return make_tool("test", "weather", weather)


def test_the_schema(tool: Tool) -> None:
    function = tool.schema["function"]
    assert (tool.schema["type"], function["name"]) == ("function", "weather")
    assert function["description"] == "Report the weather.\n\nIt may be wrong."
    parameters = function["parameters"]
    assert (parameters["type"], parameters["required"], parameters["additionalProperties"]) == (
        "object",
        ["city"],
        False,
    )
    assert parameters["properties"] == {
        "city": {"type": "string", "description": "Name of the city, with the country."},
        "days": {"type": "integer", "description": "Number of days.", "default": 1},
        "unit": {"type": "string", "enum": ["c", "k"], "description": "Unit of temperatures.", "default": "c"},
        "kind": {"anyOf": [{"type": "string", "enum": ["short", "long"]}, {"type": "null"}], "default": None},
        "places": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
        "limits": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
            "default": None,
        },
        "exact": {"type": "boolean", "default": False},
    }
    json.dumps(tool.schema)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"city": "a"}, {"city": "a"}),
        ({"city": 5}, {"city": "5"}),
        ({"city": "5", "days": "3"}, {"city": "5", "days": 3}),
        ({"city": "a", "unit": "k"}, {"city": "a", "unit": Unit.KELVIN}),
        ({"city": "a", "places": '["x"]'}, {"city": "a", "places": ["x"]}),
        ({"city": "[1]", "limits": '{"x": "2"}'}, {"city": "[1]", "limits": {"x": 2.0}}),
        ({"city": "a", "kind": "null"}, {"city": "a", "kind": None}),
        ({"city": "a", "exact": "true"}, {"city": "a", "exact": True}),
    ],
)
def test_arguments_are_converted(tool: Tool, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert tool.arguments(given) == expected


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, "city is missing"),
        ({"city": "a", "town": "b"}, "town is not a parameter"),
        ({"city": "a", "days": "many"}, "days: Input should be a valid integer"),
        ({"city": "a", "days": 1.5}, "days: Input should be a valid integer"),
        ({"city": "a", "kind": "x"}, "'short' or 'long'"),
        ({"city": ["a"]}, "city: Input should be a valid string"),
        ({"city": "a", "limits": {"x": "y"}}, "limits.x: Input should be a valid number"),
    ],
)
def test_wrong_arguments(tool: Tool, given: dict[str, Any], part: str) -> None:
    with pytest.raises(BadArguments) as caught:
        tool.arguments(given)
    text = str(caught.value)
    assert part in text and text.startswith("weather(city, days, unit, kind, places, limits, exact): ")
    assert "\n" not in text and "http" not in text


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["city", "days", "unit", "kind", "places", "limits", "exact"]) | st.text()


@given(st.dictionaries(NAMES, JSON | JSON.map(json.dumps), max_size=5))
def test_any_arguments_are_taken_or_refused(given: dict[str, Any]) -> None:
    try:
        found = make_tool("test", "weather", weather).arguments(given)
    except BadArguments as error:
        assert str(error)
    else:
        weather(**found)


def test_names_that_a_model_of_pydantic_reserves() -> None:
    def copy(json: str, copy: int, model_config: str, schema: bool, title: str = "x") -> None:
        """Copy."""

    tool = make_tool("test", "copy", copy)
    assert list(tool.schema["function"]["parameters"]["properties"]) == [
        "json",
        "copy",
        "model_config",
        "schema",
        "title",
    ]
    given = {"json": "a", "copy": 1, "model_config": "b", "schema": True, "title": "c"}
    assert tool.arguments(given) == given


def test_no_parameters_and_a_type_that_contains_itself() -> None:
    from dataclasses import dataclass

    @dataclass
    class Node:
        value: int
        next: Any = None

    def nothing() -> None:
        """Do nothing."""

    def many(nodes: list[Node]) -> None:
        """Take nodes."""

    assert make_tool("t", "nothing", nothing).schema["function"]["parameters"]["properties"] == {}
    many.__annotations__ = {"nodes": list[Node]}
    schema = make_tool("t", "many", many).schema
    assert "$ref" not in json.dumps(schema) and '"value": {"type": "integer"}' in json.dumps(schema)


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        ("Do it.", ("Do it.", {})),
        (
            "Do.\n\nArgs:\n  a: one\n  b (int, optional): two:\n     3\n\nRaises:\n  c: no",
            ("Do.", {"a": "one", "b": "two: 3"}),
        ),
        ("Do: it.\n\nNote:\n  a: b", ("Do: it.", {})),
        ("Args:\n  a: one", ("", {"a": "one"})),
    ],
)
def test_docstrings(doc: str, expected: tuple[str, dict[str, str]]) -> None:
    assert read_docstring(doc) == expected
