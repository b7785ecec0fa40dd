"""What a reward function may return, and reference answers as text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence, Set

_FLOAT32_MAX = 3.4028234663852886e38

SCORE_KEY = "score"


def to_score(value: object) -> float:
    """Convert a reward to a float that float32 can hold.

    Raises:
        ValueError: the value is text, missing, NaN, infinite, or not a single number.
    """
    if isinstance(value, str | bytes):
        raise ValueError(f"expected a number, got text: {value[:40]!r}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected a number, got {type(value).__name__} ({error})") from error
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        raise ValueError(f"expected a finite number, got {number}")
    return number


def split_reward(value: object) -> tuple[float, dict[str, float]]:
    """Split what a reward function returned into the score and its further components.

    Args:
        value: a number, or a mapping with the key "score". Other entries of a mapping that are finite numbers are
            components; entries of any other kind are ignored.

    Raises:
        ValueError: there is no score; see `to_score`.
    """
    if not isinstance(value, Mapping):
        return to_score(value), {}
    if SCORE_KEY not in value:
        keys = ", ".join(map(str, value)) or "no keys"
        raise ValueError(f'expected a number or a dict with the key "{SCORE_KEY}", got a dict with {keys}')
    components = {}
    for name, part in value.items():
        if name != SCORE_KEY:
            with contextlib.suppress(ValueError):
                components[str(name)] = to_score(part)
    return to_score(value[SCORE_KEY]), components


def single(answer: object) -> object:
    """Return a reference answer, which may be the only item of a list.

    Raises:
        ValueError: there is no reference answer.
    """
    while isinstance(answer, list | tuple) and len(answer) == 1:
        (answer,) = answer
    if answer is None or answer != answer:  # pandas writes NaN for what is missing
        raise ValueError("there is no reference answer: set data.answer_key")
    return answer


def required_text(answer: object) -> str:
    """Return a reference answer as text, for functions that compare with one.

    Raises:
        ValueError: there is no reference answer, or it is neither text nor a number.
    """
    answer = single(answer)
    if isinstance(answer, bool | bytes | Mapping | Sequence | Set) and not isinstance(answer, str):
        raise ValueError(
            f"the reference answer {str(answer)[:40]!r} is of the type {type(answer).__name__}; text or a number is "
            "needed (data.answer_key)"
        )
    return str(answer)
