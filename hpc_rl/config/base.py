"""What all sections of the configuration share: strict validation, and types of text and tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpc_rl.config.keys import leaf_types

REPLACES_VARIABLES = "variables in it are replaced"
"""Marks a type, in Annotated, whose values may contain `$NAME` (see `hpc_rl.config.references`)."""
MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux file systems (NAME_MAX)."""
MAX_PATH_BYTES = 4095
"""Longest path that Linux accepts (PATH_MAX, without the final NUL)."""


class Section(BaseModel):
    """A group of options. Unknown keys, non-finite numbers, and booleans in place of numbers are errors."""

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # pydantic before 2.10 warns of names that begin with "model_"
    )

    def problems(self) -> Iterator[str]:
        """Yield one message for each combination of values that cannot work. Sections with such rules override it."""
        return iter(())

    def _is_changed(self, name: str) -> bool:
        """Return whether an option has another value than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := list(self.problems()):
            raise ValueError("\n".join(found))
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _null_removes(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the default of a section, table or list for null, which removes what a lower layer set."""
        default = cls.model_fields[str(info.field_name)].default
        return default if value is None and isinstance(default, BaseModel | dict | list) else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        types = leaf_types(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and types & {int, float} and bool not in types:
            raise ValueError(f"expected a number, found {str(value).lower()}")
        return value

    def __hash__(self) -> int:
        """Return equal hashes for equal sections, including those with lists and tables."""
        return hash(self.model_dump_json())

    def updated(self, key: str, value: Any) -> Self:
        """Return a copy with another value of one dotted key. The value is not validated."""
        name, _, rest = key.partition(".")
        return self.model_copy(update={name: getattr(self, name).updated(rest, value) if rest else value})


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _at_least_one(value: list[str]) -> list[str]:
    if not value:
        raise ValueError("name at least one data file")
    return value


def possible_path(value: str) -> str:
    """Expand `~` and check that the operating system accepts the path. The file need not exist.

    Raises:
        ValueError: a name or the path is too long, contains a NUL character, or begins with an unknown home folder.
    """
    path = with_home(value)
    longest = max((len(os.fsencode(name)) for name in path.split("/")), default=0)
    if longest > MAX_NAME_BYTES:
        raise ValueError(f"{value[:40]}...: a name in this path has {longest} bytes; the limit is {MAX_NAME_BYTES}")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"{value[:40]}...: the path has more than {MAX_PATH_BYTES} bytes")
    if "\0" in path:
        raise ValueError(f"{value!r}: a path cannot contain a NUL character")
    return path


def with_home(path: str) -> str:
    """Return a path with the home folder in place of `~` or `~NAME`.

    Raises:
        ValueError: there is no such home folder.
    """
    found = os.path.expanduser(path)  # noqa: PTH111 - a Path would drop a trailing slash
    if found.startswith("~"):
        raise ValueError(f"{path!r}: there is no such home folder on this machine; write the path without ~")
    return found


def not_empty(value: str) -> str:
    """Return the path. Raises ValueError if it is empty."""
    if not value.strip():
        raise ValueError("the path is empty")
    return value


Path = Annotated[str, REPLACES_VARIABLES, AfterValidator(not_empty), AfterValidator(possible_path)]
Files = Annotated[list[Path], BeforeValidator(_one_or_many)]
SomeFiles = Annotated[Files, AfterValidator(_at_least_one)]


def _finite(value: Any, key: str = "") -> Any:
    """Return the value, or raise ValueError if it is or contains an infinite number or NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key or 'the value'} is {value}; expected a finite number")
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        _finite(child, f"{key}.{name}" if key else str(name))
    return value


Table = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Free-form arguments for another program."""

# Each of these values becomes one line of an sbatch script, where a line break would end the directive.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _one_line(value: str) -> str:
    if _CONTROL.search(value):
        raise ValueError(f"{value!r} contains a line break or control character, which an sbatch option cannot hold")
    return value


Line = Annotated[str, REPLACES_VARIABLES, BeforeValidator(lambda v: _one_line(v) if isinstance(v, str) else v)]
