"""What all groups of options share: strictness, and types of text."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A group of options. Unknown keys are errors, and a value is never converted behind the user's back."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True)

    def __hash__(self) -> int:
        """A section is a value: equal ones have equal hashes, lists and tables in them included."""
        return hash(self.model_dump_json())

    def updated(self, key: str, value: Any) -> Self:
        """A copy with another value of one dotted key. The value is not checked."""
        name, _, rest = key.partition(".")
        return self.model_copy(update={name: getattr(self, name).updated(rest, value) if rest else value})


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Path = Annotated[str, AfterValidator(os.path.expanduser)]
Files = Annotated[list[Path], BeforeValidator(_one_or_many)]

# Everything that becomes one line of an sbatch script: a line break there would end the directive.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _one_line(value: str) -> str:
    if _CONTROL.search(value):
        raise ValueError(f"{value!r} has a line break or control character, which no sbatch option can hold")
    return value


Line = Annotated[str, BeforeValidator(lambda v: _one_line(v) if isinstance(v, str) else v)]
