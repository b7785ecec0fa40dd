"""What the doctor finds: one thing looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

MOST_NAMED = 4
"""Nodes that a line names one by one."""
Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    name: str
    level: Level
    found: str
    remedy: str = ""
    """What to do; empty where all is well."""
    nodes: tuple[str, ...] = ()
    """Nodes that it holds for; none for the login node, and for what nodes did together."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Check:
    return Check(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Check:
    return Check(name, "problem", found, remedy)


def together(checks: Sequence[Check]) -> list[Check]:
    """The same of several nodes as one, in the order of the names' first appearance."""
    names = list(dict.fromkeys(check.name for check in checks))
    merged: dict[Check, tuple[str, ...]] = {}
    for check in sorted(checks, key=lambda check: names.index(check.name)):
        alike = replace(check, nodes=())
        merged[alike] = merged.get(alike, ()) + check.nodes
    return [replace(check, nodes=tuple(dict.fromkeys(nodes))) for check, nodes in merged.items()]


def has_problem(checks: Sequence[Check]) -> bool:
    return any(check.level == "problem" for check in checks)


def as_text(checks: Sequence[Check]) -> str:
    """A line for each."""
    width = max((len(check.name) for check in checks), default=0)
    return "\n".join(f"{check.level:<7}  {check.name:<{width}}  {_sentence(check)}" for check in checks)


def _sentence(check: Check) -> str:
    return _where(check.nodes) + check.found + (f"; {check.remedy}" if check.remedy else "")


def _where(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    named = ", ".join(nodes) if len(nodes) <= MOST_NAMED else f"{nodes[0]} and {len(nodes) - 1} others"
    return f"{named}: "
