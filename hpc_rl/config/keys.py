"""Dotted keys: the options of a schema by name, and values in nested tables."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from hpc_rl.config.tree import put
from hpc_rl.errors import UserError

MISSING = "???"
"""Stands for the value of a required key in a configuration that is not complete yet."""


def documented_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, meaning) of every option, in the order of the schema."""
    meanings = _meanings(schema)
    for name, field in schema.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from documented_keys(annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _yaml_value(field.default)
        yield f"{prefix}{name}", _type_name(annotation), default, meanings.get(name, "")


@cache
def _meanings(schema: type[BaseModel]) -> dict[str, str]:
    """Return the text below each option in the source, of the class and of those that it extends.

    pydantic can do this too (use_attribute_docstrings), but at each start of each process, which takes longer than the
    rest of a schema.
    """
    found: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            assert isinstance(definition, ast.ClassDef)
            found |= _texts_below(definition.body)
    return found


def _texts_below(statements: Sequence[ast.stmt]) -> dict[str, str]:
    found = {}
    for option, text in pairwise(statements):
        match option, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found


def find_annotation(schema: type[BaseModel], key: str) -> Any:
    """Return the type of a dotted key, or None if the schema has no such key."""
    annotation: Any = schema
    for part in key.split("."):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(part)
            if field is None:
                return None
            annotation = field.annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return None
    return annotation


def nearest(key: str, known: Sequence[str], meanings: Mapping[str, str] | None = None) -> str:
    """Suggest known keys for an unknown one, as the end of an error message; empty if none is similar.

    Args:
        meanings: key -> sentence about it, to find keys by words (`optim.learning_rate` -> `optim.lr`).
    """
    found = _similar(key, known, meanings or {})
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _similar(key: str, known: Sequence[str], meanings: Mapping[str, str]) -> list[str]:
    """Return the most similar keys, by the first of these rules that finds any.

    The known key ends with the whole unknown one; the last parts are almost equal; the key's sentence has all words of
    the last part; the whole keys are similar; the last parts are similar.
    """
    if inside := [name for name in known if name.endswith(f".{key}")]:
        return inside[:3]
    section, _, leaf = key.rpartition(".")
    if close := _by_leaf(section, leaf, known, cutoff=0.8):
        return close
    words = leaf.lower().split("_")
    in_section = [name for name in meanings if name.startswith(f"{section}.")] or list(meanings)
    if len(words) > 1:
        for name in in_section:
            if all(re.search(rf"\b{re.escape(word)}\b", meanings[name], re.IGNORECASE) for word in words):
                return [name]
    return difflib.get_close_matches(key, known, n=1, cutoff=0.6) or _by_leaf(section, leaf, known, cutoff=0.6)


def _by_leaf(section: str, leaf: str, known: Sequence[str], cutoff: float) -> list[str]:
    """Return the key whose last part is most similar to `leaf`, preferably inside the same section."""
    by_leaf: dict[str, list[str]] = {}
    for name in known:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    for close in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=cutoff):
        return [next((name for name in by_leaf[close] if name.startswith(f"{section}.")), by_leaf[close][0])]
    return []


def leaf_types(annotation: Any) -> set[Any]:
    """Return the plain types inside unions, lists and annotations; a Literal counts as the types of its values."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (dict, tuple):
        return set()
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return set().union(*map(leaf_types, parts)) if parts else {annotation}


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(
            str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation)
        )
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(map(_type_name, get_args(annotation)))}]"
    if origin is not None:
        return " | ".join(map(_type_name, get_args(annotation)))
    return "null" if annotation is type(None) else annotation.__name__


def _yaml_value(value: Any) -> str:
    import yaml

    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


def select(tables: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the parts of nested tables that sections and dotted keys name.

    Raises:
        UserError: there is no such section or key; the message suggests the nearest one.
    """
    found: dict[str, Any] = {}
    for name in names:
        value: Any = tables
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                known = list(_dotted(tables))
                raise UserError(f"{name}: there is no section or key of this name{nearest(name, known)}")
            value = value[part]
        put(found, name, value)
    return found


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tables.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
