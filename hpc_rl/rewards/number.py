"""What counts as a score."""

from __future__ import annotations

import math

_FLOAT32_MAX = 3.4028234663852886e38


def to_score(value: object) -> float:
    """A reward as a float that float32 can hold.

    Raises:
        ValueError: text, nothing, NaN, infinite, or anything else that is no single number.
    """
    if isinstance(value, str | bytes):
        raise ValueError(f"no number: {value[:40]!r}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"no number, but {type(value).__name__} ({error})") from error
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        raise ValueError(f"no finite number: {number}")
    return number


def needed(answer: object) -> str:
    """A reference answer as text, for the functions that compare with one.

    Raises:
        ValueError: there is none.
    """
    if answer is None:
        raise ValueError("there is no reference answer: set data.answer_key")
    return str(answer)
