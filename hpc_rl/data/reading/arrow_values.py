"""Values of tables as their author wrote them.

Arrow, and with it parquet and `datasets`, gives all values of a column one type. It adds null for each field that only
another row has, stores mappings as lists of pairs, and turns text and numbers into times, decimals and encoded JSON.
With these functions, rows mean the same in a table as in JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    import pyarrow as pa

Decode = Callable[[Any], Any]
"""Returns what an author wrote for a value."""


def decoders(schema: pa.Schema, *, has_json: bool = True) -> dict[str, Decode]:
    """Return what to do with the values of columns; nothing for columns whose values need no change.

    Args:
        has_json: whether values of Arrow's type for JSON are text. `datasets` has read them already.
    """
    found = {field.name: _decoder(field.type, has_json) for field in schema}
    return {name: decode for name, decode in found.items() if decode is not None}


def as_written(value: Any) -> Any:
    """Return a value whose Arrow type is not known, as its author wrote it.

    Fields of mappings that are null are left out.
    """
    if isinstance(value, Mapping):
        return {name: as_written(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [as_written(part) for part in value]
    return _scalar(value)


def _decoder(kind: pa.DataType, has_json: bool) -> Decode | None:
    """Return what to do with the values of an Arrow type; None: nothing."""
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _decoder(kind.value_type, has_json)
    if types.is_map(kind):
        return _pairs(_decoder(kind.item_type, has_json))
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return _struct({field.name: _decoder(field.type, has_json) for field in fields})
    if hasattr(kind, "value_field"):  # all kinds of lists
        return _list(_decoder(kind.value_type, has_json))
    if getattr(kind, "extension_name", None) == "arrow.json":
        return _from_json if has_json else None
    is_plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return None if is_plain or is_text or types.is_null(kind) else _scalar


def _struct(fields: Mapping[str, Decode | None]) -> Decode:
    def decode(value: Any) -> Any:
        if not isinstance(value, Mapping):  # such as an image that `datasets` has decoded
            return value
        return {name: _decoded(fields.get(name), part) for name, part in value.items() if part is not None}

    return decode


def _pairs(inner: Decode | None) -> Decode:
    """A mapping has only the keys that its author wrote, so that null is a value."""
    return lambda pairs: None if pairs is None else {key: _decoded(inner, value) for key, value in pairs}


def _list(inner: Decode | None) -> Decode | None:
    if inner is None:
        return None
    return lambda values: [_decoded(inner, value) for value in values] if isinstance(values, list) else values


def _decoded(decode: Decode | None, value: Any) -> Any:
    return value if decode is None else decode(value)


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _scalar(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return _number(value)
    return value


def _number(value: Decimal) -> int | float | str:
    """Return a decimal as a number that is equal to it; as text if there is none."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)
