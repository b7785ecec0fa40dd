"""The doctor's checks: what each one found, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

MOST_NAMED = 4
"""Nodes that a line lists one by one."""
Level = Literal["ok", "skipped", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    name: str
    level: Level
    found: str
    remedy: str = ""
    """What to do; empty if nothing is wrong."""
    nodes: tuple[str, ...] = ()
    """Nodes with this result; empty for the login node, and for what all nodes did together."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def skipped(name: str, found: str) -> Check:
    return Check(name, "skipped", found)


def warning(name: str, found: str, remedy: str) -> Check:
    return Check(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Check:
    return Check(name, "problem", found, remedy)


def merged(checks: Sequence[Check]) -> list[Check]:
    """Merge equal results of several nodes into one, in the order in which the names first appear."""
    names = list(dict.fromkeys(check.name for check in checks))
    found: dict[Check, tuple[str, ...]] = {}
    for check in sorted(checks, key=lambda check: names.index(check.name)):
        alike = replace(check, nodes=())
        found[alike] = found.get(alike, ()) + check.nodes
    return [replace(check, nodes=tuple(dict.fromkeys(nodes))) for check, nodes in found.items()]


def has_problem(checks: Sequence[Check]) -> bool:
    return any(check.level == "problem" for check in checks)


def as_text(checks: Sequence[Check]) -> str:
    """Render one line for each check."""
    width = max((len(check.name) for check in checks), default=0)
    return "\n".join(f"{check.level:<7}  {check.name:<{width}}  {_sentence(check)}" for check in checks)


def _sentence(check: Check) -> str:
    return _where(check.nodes) + check.found + (f"; {check.remedy}" if check.remedy else "")


def _where(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    named = ", ".join(nodes) if len(nodes) <= MOST_NAMED else f"{nodes[0]} and {len(nodes) - 1} others"
    return f"{named}: "
