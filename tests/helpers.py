"""Small models and data made on the spot, for tests, the demo and benchmarks; and recorded answers of Slurm."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.probes import tiny_model
from hpc_rl.probes.tiny_model import CHAT_TEMPLATE, chats, make_tokenizer, write_chats

__all__ = [
    "CHAT_TEMPLATE",
    "chats",
    "hpc_rl",
    "make_tiny_model",
    "make_tokenizer",
    "pretend_vllm",
    "recorded",
    "write_chats",
    "write_python_program",
]


def make_tiny_model(folder: Path, **settings: Any) -> Path:
    """Create a model. The test is skipped if transformers is too old for it."""
    return tiny_model.make_tiny_model(folder, **of_this_transformers(settings.get("kind", "qwen2"), settings))


def of_this_transformers(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a model as this version names them. The test is skipped if transformers is too old for it."""
    import pytest
    from transformers import CONFIG_MAPPING

    from tests.marks import IS_TRANSFORMERS_4

    rotary = settings.get("rope_parameters", {"rope_type": "default"})
    if kind not in CONFIG_MAPPING or (IS_TRANSFORMERS_4 and (kind.startswith("phi") or "rope_type" not in rotary)):
        pytest.skip(f"this version of transformers has no {kind}, or not with these settings")
    if not IS_TRANSFORMERS_4 or "rope_parameters" not in settings:
        return settings
    names = {"original_max_position_embeddings", "rope_theta"} & rotary.keys()
    others = {name: value for name, value in settings.items() if name != "rope_parameters"}
    return {**others, "rope_scaling": rotary, **{name: rotary[name] for name in names}}


def hpc_rl(
    *words: str, folder: Path | None = None, environ: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command of hpc-rl in a process of its own.

    Args:
        environ: replaces the environment.
    """
    command = [sys.executable, "-m", "hpc_rl.cli", *words]
    environ = os.environ if environ is None else environ
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=check)


def pretend_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a submission find vLLM where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        (folder / "packages" / "vllm").mkdir(parents=True)
        monkeypatch.syspath_prepend(folder / "packages")


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
