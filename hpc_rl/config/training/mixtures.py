"""The option train_files: data files, or data files with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hpc_rl.config.base import REPLACES_VARIABLES, SomeFiles, not_empty, possible_path


class _FilesOrWeights:
    """Accept a list of files, the name of one, or a table from files to weights, which may be written as text."""

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, files: _weights(value) if _is_table(value) else files(value),
            handler.generate_schema(SomeFiles),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )


TrainFiles = Annotated[list[str] | dict[str, float], REPLACES_VARIABLES, _FilesOrWeights()]
"""Names of files, or a table from names to weights. Iteration over either yields the names."""


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, str) and value.startswith("{"))


def _weights(value: Mapping[Any, Any] | str) -> dict[str, float]:
    """Return the weight of each file."""
    pairs = _parsed(value) if isinstance(value, str) else list(value.items())
    if not pairs:
        raise ValueError("name at least one data file")
    found: dict[str, float] = {}
    for name, given in pairs:
        path = possible_path(not_empty(str(name)))
        if path in found:
            raise ValueError(f"{path} is named twice: give each file one weight")
        weight = _number(given)
        if weight is None or not 0 < weight < math.inf:
            raise ValueError(
                f"{path} has the weight {given!r}; a weight is a positive number: write {{FILE: WEIGHT, FILE: WEIGHT}}"
                ", and leave out the files that are not used"
            )
        found[path] = weight
    if math.isinf(sum(found.values())):
        raise ValueError("the sum of the weights is too large: use smaller ones, since only their ratios count")
    return found


def _parsed(text: str) -> list[tuple[str, str]]:
    """Return names and weights of `{NAME: WEIGHT, NAME: WEIGHT}`. Names may contain colons, as those on the hub do."""
    if not text.endswith("}"):
        raise ValueError(f"{text!r} has no closing brace: write {{FILE: WEIGHT, FILE: WEIGHT}}")
    entries = [entry for entry in text[1:-1].split(",") if entry.strip()]
    pairs = [entry.rpartition(":") for entry in entries]
    if without := next((weight for name, _, weight in pairs if not name), None):
        raise ValueError(f"{without.strip()} has no weight: write {{FILE: WEIGHT, FILE: WEIGHT}}")
    return [(name.strip().strip("'\""), weight.strip()) for name, _, weight in pairs]


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
