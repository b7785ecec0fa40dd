"""Commands as text, in documentation and --help: parsed, and composed where they hold options; not run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import typer

from hpc_rl.cli import app
from hpc_rl.cli.submit import SlurmFlags
from hpc_rl.config.compose import compose, compose_partly

_ALWAYS = {"--help", "--install-completion", "--show-completion"}


def all_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group of commands, with the words that lead to it; the program itself has none."""
    yield from _below((), typer.main.get_command(app))


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _below((*words, name), child)


def find_command(words: list[str]) -> tuple[tuple[str, ...], Any, list[str]]:
    """The command that words after `hpc-rl` name, and what is left of them."""
    command: Any = typer.main.get_command(app)
    path: tuple[str, ...] = ()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        path, command = (*path, name), command.commands[name]
    return path, command, words


def understand(line: str) -> None:
    """Parse a command line, and compose the configuration of a job that it describes.

    Raises:
        KeyError, click.UsageError, UserError: there is no such command, or its options are none.
    """
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        compose("ppo", words[3:])
        return
    own, _, program = " ".join(map(shlex.quote, words[1:])).partition(" -- ")
    path, command, arguments = find_command(shlex.split(own))
    if "--help" in arguments or not path:
        assert {word for word in arguments if word.startswith("-")} <= _ALWAYS
        return
    found = command.make_context(path[-1], arguments).params
    if path in (("submit",), ("render",)) and not found.get("script"):
        flags = SlurmFlags(**{key: value for key, value in found.items() if key in SlurmFlags.__dataclass_fields__})
        compose(found["kind"], found["arguments"] or [], flags.settings())
        assert bool(program) == (found["kind"] in ("torchrun", "ray")), "only torchrun and ray have a program"
    elif path == ("config",):
        compose_partly(found["kind"], [word for word in found["words"] or [] if "=" in word])
    elif path == ("fetch",):
        compose("torchrun", [word for word in found["names"] if "=" in word])
