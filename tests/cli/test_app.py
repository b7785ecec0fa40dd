"""Arguments and options that several commands share: kinds of jobs, and sizes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from hpc_rl.cli import app
from hpc_rl.errors import UserError


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("submit stf", "there is no kind 'stf': choose one of sft, dpo, rm, .*, torchrun, ray; did you mean sft\\?$"),
        ("config x", "there is no kind 'x': choose one of .*ray$"),
        (
            "data check f.jsonl --kind dppo",
            "there is no kind 'dppo': choose one of sft, dpo, rm, distill, ppo; did you",
        ),
        ("submit grpo", "there is no kind 'grpo': choose one of .*: write hpc-rl submit ppo algorithm=grpo$"),
        ("submit kto", ": write hpc-rl submit dpo algorithm.loss=kto$"),
        ("submit train", ": write hpc-rl submit KIND, with the kind sft, dpo, rm, distill or ppo$"),
        ("train sft", "^there is no command 'train': write hpc-rl submit KIND, with the kind sft,"),
        ("sft model=m", "^there is no command 'sft': write hpc-rl submit sft$"),
        ("dr-grpo", "^there is no command 'dr-grpo': write hpc-rl submit ppo algorithm=dr_grpo$"),
        ("resume sft-1", "^there is no command 'resume': write hpc-rl requeue$"),
        ("submit sft --nodes 0", "--nodes 0: expected at least 1$"),
        ("submit sft --cpus-per-task=-3", "--cpus-per-task -3: expected at least 1$"),
        (
            "eval m --gpus-per-node 0",
            "--gpus-per-node 0: expected at least 1; for a job without GPUs, set trainer",
        ),
        ("chain iterativ-dpo", "there is no pipeline or kind 'iterativ-dpo': .*; did you mean iterative-dpo\\?$"),
    ],
)
def test_a_mistyped_word_is_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        found = run(*words.split()).exception
        raise found if found else AssertionError("no error")


def test_a_word_that_means_nothing_is_left_to_typer() -> None:
    done = run("statsu")
    assert done.exit_code == 2 and "No such command" in done.output


def test_a_command_without_a_run_takes_the_one_submitted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("status", "logs", "watch", "metrics"):
        assert "no run was submitted from here" in str(run(command).exception)
    for number, name in enumerate(("b", "a", "c")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps({"job_id": "local-1", "host": "elsewhere"}))
        (folder / "status.json").write_text(json.dumps({"job_id": "local-1", "state": "COMPLETED", "exit_code": 0}))
        (folder / "job-local-1.log").write_text(f"log of {name}\n")
        (folder / "metrics.jsonl").write_text(f'{{"step": 7, "total_steps": 9, "time": 5.0, "train/loss": {number}}}\n')
        os.utime(folder / "job.json", (0, 5 if name == "a" else number))
    (tmp_path / "runs" / "notes").mkdir()
    assert run("status").output.split()[:2] == ["run", "a"]
    assert run("logs").output == "log of a\n"
    assert run("metrics").output.split() == ["step", "loss", "7", "1.0000"]
    assert run("metrics", "c", "--csv").output == "step,total_steps,time,train/loss\n7,9,5.0,2\n"


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("eval model reward.function=exact --job-name x --nodes 1", "data.files=openai/gsm8k:main"),
        ("submit sft --job-name x --time 1:00:00 --dry-run", "model=qwen2.5-0.5b"),
        ("sweep sft --job-name x optim.lr=1,2", "model=qwen2.5-0.5b"),
        ("plan sft --nodes 2", "model=qwen2.5-0.5b"),
    ],
)
def test_a_complete_command_repeats_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, added: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/opt/env/bin/hpc-rl", *words.split()])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    shown = str(run(*words.split()).exception).splitlines()[-1]
    assert shown.startswith(f"  hpc-rl {words} ") and added in shown


def test_the_help_of_a_stage_is_that_of_submit() -> None:
    done = run("chain", "sft", "--help")
    assert done.exit_code == 0 and "hpc-rl submit" in done.stdout and "--gpus-per-node" in done.stdout


def commands(group: Any, *words: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, name)
        else:
            yield " ".join((*words, name)), command


@pytest.mark.parametrize("words", [name for name, _ in commands(typer.main.get_command(app))])
def test_each_command_can_say_what_it_does(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is no option ends the command before it begins."""
    shown: list[str] = []
    monkeypatch.setattr(sys.modules["hpc_rl.cli.app"], "begin_command", shown.append)
    run(*words.split(), "--no-such-option")
    (what,) = shown
    assert re.fullmatch(r"still at work: [a-z][^\n]{20,190}[^.]", what), what
