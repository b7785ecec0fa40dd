"""The points of a sweep, out of `key=a,b` words. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_rl.errors import UserError

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_QUOTES = "'\""


@dataclass(frozen=True)
class Point:
    """One combination of the values."""

    overrides: tuple[str, ...]
    """All options of the run, `key=value` each."""
    values: dict[str, str]
    """Those that are swept."""


def grid(words: Sequence[str]) -> list[Point]:
    """Every combination of the values; the last key changes fastest.

    A comma separates values where it stands outside of brackets and quotes: `betas=[0.9,0.95],[0.9,0.99]` are two.

    Raises:
        UserError: a list is malformed, or nothing has several values.
    """
    choices = [_choices(word) for word in words]
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    swept = [key for key, values in zip(keys, choices, strict=True) if len(values) > 1]
    if not swept:
        raise UserError(
            "nothing to sweep: give a key several values, such as optim.lr=1e-5,3e-5 (one run is `hpc-rl submit`)"
        )
    for key in swept:
        if keys.count(key) > 1:
            raise UserError(f"{key} is given {keys.count(key)} times: write all its values in one list, {key}=A,B,C")
    return [
        Point(
            combination,
            {key: word.partition("=")[2] for key, word in zip(keys, combination, strict=True) if key in swept},
        )
        for combination in itertools.product(*choices)
    ]


def _choices(word: str) -> list[str]:
    """`key=a` and `key=b` for `key=a,b`; another word as it is."""
    key, equals, text = word.partition("=")
    if not equals or "," not in text:
        return [word]
    values = _split(key, text)
    for value in values:
        if not value:
            raise UserError(f"{word}: an empty value; write {key}=A,B with nothing but a comma between two values")
        if values.count(value) > 1:
            raise UserError(f"{word}: {value} stands there {values.count(value)} times")
    return [f"{key}={value}" for value in values]


def _split(key: str, text: str) -> list[str]:
    values, start = [], 0
    waiting: list[str] = []  # for the ends of brackets and quotes that are open
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
            raise UserError(f"{key}={text}: {character} closes nothing")
        elif character == "," and not waiting:
            values.append(text[start:place])
            start = place + 1
    if waiting:
        raise UserError(f"{key}={text}: {waiting[-1]} is missing")
    return [*values, text[start:]]
