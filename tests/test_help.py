"""What --help and the shell's completion say of every command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_rl import __version__
from tests.commands import all_commands, find_command, understand

COMMANDS = {words: command for words, command in all_commands()}


def example(command: Any) -> str:
    """The last line of a command's help, without "Example: "."""
    lines = [line.strip() for line in (command.help or "").splitlines() if line.strip()]
    word, _, line = (lines or [""])[-1].partition(": ")
    assert word == "Example", f"the help ends with {lines[-1:]} instead of an example"
    return line


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "hpc-rl")
def test_every_help_ends_with_an_example_that_works(words: tuple[str, ...]) -> None:
    line = example(COMMANDS[words])
    program, *rest = shlex.split(line)
    shown = ("chain",) if words == ("pipeline",) else words  # a form of chain, which has options of its own
    assert program == "hpc-rl" and tuple(rest[: len(shown)]) == shown
    assert find_command(rest)[1] is not None
    understand(line)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "hpc-rl")
def test_a_paragraph_of_a_help_text_is_one_line(words: tuple[str, ...]) -> None:
    """The terminal breaks it where it ends; Typer would break it where the source does too."""
    assert [paragraph for paragraph in COMMANDS[words].help.split("\n\n") if "\n" in paragraph] == []


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_rl.cli", *words]
    environ = {**os.environ, "COLUMNS": "100", **environ}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False)


def test_help_shows_the_example_and_the_programs_name(tmp_path: Path) -> None:
    shown = run(tmp_path, "wandb", "sync", "--help").stdout
    assert "Usage: hpc-rl wandb sync" in shown and "Example: hpc-rl wandb sync sft-1" in shown


def test_the_shell_completes_commands_and_names_of_runs(tmp_path: Path) -> None:
    for name in ("first", "final", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)

    def proposed(text: str) -> list[str]:
        words = {"COMP_WORDS": text, "COMP_CWORD": str(len(text.split(" ")) - 1)}
        return run(tmp_path, _HPC_RL_COMPLETE="complete_bash", **words).stdout.split()

    assert proposed("hpc-rl status fi") == ["final", "first"]
    assert proposed("hpc-rl wandb sync o") == ["other"]
    assert proposed("hpc-rl stat") == ["status"]
    assert "ppo" in proposed("hpc-rl submit p")


def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m hpc_rl.cli --install-completion; code=$?; exit $code"
    environ = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    script = (tmp_path / ".bash_completions" / "hpc-rl.sh").read_text()
    assert "_HPC_RL_COMPLETE=complete_bash" in script and "hpc-rl.sh" in (tmp_path / ".bashrc").read_text()


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert run(tmp_path, "--version").stdout == f"hpc-rl {__version__}\n"


def test_keys_and_sections_are_filtered(tmp_path: Path) -> None:
    shown = run(tmp_path, "config", "ppo", "--help", "rollout").stdout
    assert "rollout.n = 1" in shown and "optim.lr = " not in shown
    assert run(tmp_path, "config", "sft", "optim").stdout.splitlines()[:2] == ["optim:", "  lr: 1.0e-05"]
