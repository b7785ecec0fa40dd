"""What people type before a program: `uv run`, `ray job submit ... --`. A job has its Python and its Ray."""

from __future__ import annotations

from hpc_rl.adapters.program import Program

_VALUED = (
    *("--extra", "--no-extra", "--group", "--no-group", "--only-group", "--env-file", "--with", "--with-editable"),
    *("--with-requirements", "--python", "-p", "--project", "--directory", "--package", "--index", "--index-url", "-i"),
    *("--extra-index-url", "--find-links", "-f", "--refresh-package", "--cache-dir", "--config-file", "--link-mode"),
)
"""Options of `uv run` that a value follows."""


def plain(program: Program) -> Program:
    """Return a program without these prefixes: what the job's Python runs."""
    return Program(_plain(program.words), program.folder)


def _plain(words: tuple[str, ...]) -> tuple[str, ...]:
    if words[:3] == ("ray", "job", "submit") and "--" in words:
        words = words[words.index("--") + 1 :]
    if words[:2] != ("uv", "run"):
        return words
    words = words[2:]
    while words and words[0].startswith("-") and words[0] not in ("-m", "--module"):
        words = words[2 if words[0] in _VALUED else 1 :]
    if words[:1] == ("--module",):
        words = ("-m", *words[1:])
    return ("python", *words) if words[:1] == ("-m",) or (words[:1] and words[0].endswith(".py")) else words
