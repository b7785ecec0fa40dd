"""The points of a sweep, parsed from `key=a,b` words. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_rl.errors import UserError

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_QUOTES = "'\""
DEFAULT_MOST = 1000
"""Most tasks of an array if MaxArraySize has its default (slurm.conf(5))."""


@dataclass(frozen=True)
class Point:
    """One combination of the swept values."""

    values: dict[str, str]
    """Dotted key -> value, as typed."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


def grid(words: Sequence[str], most: Callable[[Sequence[str]], int]) -> tuple[list[str], list[Point]]:
    """Return the options common to all points, and every combination of the swept values; the last key changes fastest.

    A comma separates values if it is outside brackets and quotes: `betas=[0.9,0.95],[0.9,0.99]` has two values.

    Args:
        most: returns the limit on the tasks of an array in the cluster of a point with these words; called only for a
            sweep above Slurm's default.

    Raises:
        UserError: a list is malformed, no key has several values, or there are too many combinations.
    """
    choices = {word: _choices(word) for word in words}
    common = [word for word, values in choices.items() if len(values) == 1]
    swept: dict[str, list[str]] = {}
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for word, values in choices.items():
        key = word.partition("=")[0].lstrip("+")
        if len(values) > 1 and keys.count(key) > 1:
            raise UserError(f"{key} is given {keys.count(key)} times: write all its values in one list, {key}=A,B,C")
        if len(values) > 1:
            swept[key] = values
    if not swept:
        raise UserError(
            "nothing to sweep: give a key several values, such as optim.lr=1e-5,3e-5; for one run use `hpc-rl submit`"
        )
    count = math.prod(map(len, swept.values()))
    if count > DEFAULT_MOST and count > (
        limit := most([*common, *(f"{key}={values[0]}" for key, values in swept.items())])
    ):
        sizes = " x ".join(f"{key}: {len(values)}" for key, values in swept.items())
        raise UserError(
            f"the sweep has {count} points ({sizes}), but this cluster allows at most {limit} tasks per array "
            "(MaxArraySize): sweep fewer values, or submit several sweeps"
        )
    return common, [Point(dict(zip(swept, values, strict=True))) for values in itertools.product(*swept.values())]


def _choices(word: str) -> list[str]:
    """Return `a` and `b` for `key=a,b`, and any other word unchanged."""
    key, equals, text = word.partition("=")
    if not equals or "," not in text:
        return [word]
    values = _split(key, text)
    for value in values:
        if not value:
            raise UserError(f"{word}: a value is empty; write {key}=A,B with one comma between two values")
        if values.count(value) > 1:
            raise UserError(f"{word}: {value} is listed {values.count(value)} times")
    return values


def _split(key: str, text: str) -> list[str]:
    values, start = [], 0
    waiting: list[str] = []  # closing characters of the brackets and quotes that are open
    for place, character in enumerate(text):
        if waiting and character == waiting[-1]:
            waiting.pop()
        elif waiting and waiting[-1] in _QUOTES:
            continue
        elif character in _CLOSING:
            waiting.append(_CLOSING[character])
        elif character in _QUOTES:
            waiting.append(character)
        elif character in _CLOSING.values():
            raise UserError(f"{key}={text}: {character} has no opening bracket")
        elif character == "," and not waiting:
            values.append(text[start:place])
            start = place + 1
    if waiting:
        raise UserError(f"{key}={text}: a closing {waiting[-1]} is missing")
    return [*values, text[start:]]
