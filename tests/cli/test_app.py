"""Arguments and options that several commands share: kinds of jobs, and sizes."""

from __future__ import annotations

import pytest
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


def test_the_help_of_a_stage_is_that_of_submit() -> None:
    done = run("chain", "sft", "--help")
    assert done.exit_code == 0 and "hpc-rl submit" in done.stdout and "--gpus-per-node" in done.stdout
