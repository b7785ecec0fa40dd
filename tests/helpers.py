"""Small models and data made on the spot, for tests, the demo and benchmarks; and recorded answers of Slurm."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hpc_rl.probes.tiny_model import CHAT_TEMPLATE, chats, make_tiny_model, make_tokenizer, write_chats

__all__ = [
    "CHAT_TEMPLATE",
    "chats",
    "make_tiny_model",
    "make_tokenizer",
    "recorded",
    "write_chats",
    "write_python_program",
]


def recorded(cluster: str, command: str) -> str:
    """What a real Slurm has answered (tests/slurm/recorded), without the lines that say to what."""
    lines = (Path(__file__).parent / "slurm" / "recorded" / cluster / f"{command}.txt").read_text().splitlines(True)
    return "".join(line for line in lines if not line.startswith("#"))


def write_python_program(path: Path, code: str, *options: str) -> None:
    """Write a program in Python, with options of its interpreter.

    A first line `#!INTERPRETER` cannot name a path with a space. The command for the shell is a string in Python.
    """
    interpreter = shlex.join([sys.executable, *options])
    path.write_text(f"#!/bin/sh\n'''exec' {interpreter} \"$0\" \"$@\"\n'''\n{code}")
    path.chmod(0o755)
