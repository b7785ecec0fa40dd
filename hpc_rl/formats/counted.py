"""Numbers of things, in words."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`, `1,024 nodes` or `0 nodes`.

    Args:
        noun: in the singular. Its plural ends with `s`, or with `es` after `ss`.
    """
    plural = "" if count == 1 else "es" if noun.endswith("ss") else "s"
    return f"{count:,} {noun}{plural}"
