"""Secrets of an ordinary user, by every way into what a submission writes: none is in a file, and none is printed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.users import VICTIM, as_ordinary, hpc_rl, run

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user needs root"),
]
TOKEN = "hf_abcdefghijklmnop1234"
SECRETS = {
    "HF_TOKEN": TOKEN,
    "AWS_SESSION_TOKEN": "session-0123456789",
    "OPENAI_KEY": "sk-0123456789abcdef",
    "MY_PASSWD": "hunter2",
}
SFT = ("submit", "sft", "--dry-run", "model.path=model", "data.train_files=chats.jsonl")
PPO = ("submit", "ppo", "--dry-run", "model.path=model", "data.train_files=d.jsonl", "reward.function=exact")
TORCHRUN = ("submit", "torchrun", "--dry-run", "--nodes", "1")
WAYS = {
    "a recipe": ((*PPO, "recipe=mine"), "slurm.setup"),
    "an option": ((*SFT, "slurm.setup=['login ${oc.env:MY_PASSWD}']"), "slurm.setup"),
    "an option, typed": ((*SFT, f"slurm.setup=['login {TOKEN}']"), "slurm.setup"),
    "a variable": ((*SFT, "slurm.env.MINE=sk-0123456789abcdef"), "slurm.env.MINE"),
    "a variable by its name": ((*SFT, "slurm.env.MY_PASSWD=x"), "slurm.env.MY_PASSWD"),
    "an option of sbatch": ((*SFT, "slurm.sbatch.comment=session-0123456789"), "slurm.sbatch.comment"),
    "a project of wandb": ((*SFT, "trainer.project_name=sk-0123456789abcdef"), "trainer.project_name"),
    "a program": ((*TORCHRUN, "--", "train.py", "--token", TOKEN), "the word 3 of the program"),
    "render": (("render", "sft", *SFT[3:], "slurm.setup=['a ${oc.env:HF_TOKEN}']"), "slurm.setup"),
    "a sweep": (("sweep", "sft", "--dry-run", *SFT[3:], "slurm.env.MINE=sk-0123456789abcdef,b"), "slurm.env.MINE"),
}
"""Way -> the command, and what the message names."""
RECIPE = "# @package _global_\nslurm:\n  setup: ['huggingface-cli login --token ${oc.env:HF_TOKEN}']\n"
SNAPSHOT = "from pathlib import Path\nfrom hpc_rl.submission.queue import git_snapshot\nprint(git_snapshot(Path()))"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hpc-rl-secrets-", dir="/var/tmp") as name:
        home = Path(name)
        (home / "configs" / "recipe").mkdir(parents=True)
        (home / "configs" / "recipe" / "mine.yaml").write_text(RECIPE)
        (home / "train.py").touch()
        for path in [home, *home.rglob("*")]:
            os.chown(path, VICTIM, VICTIM)
        yield home


@pytest.mark.parametrize("way", WAYS)
def test_a_submission_is_refused(home: Path, way: str) -> None:
    words, where = WAYS[way]
    done = run(VICTIM, hpc_rl(VICTIM, *words), home, **SECRETS)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert where in done.stderr, done.stderr
    assert "would show" in done.stderr
    for value in SECRETS.values():
        assert value not in done.stdout and value not in done.stderr
    written = [path for path in home.rglob("*") if path.is_file() and path.name != "mine.yaml"]
    assert not [
        path for path in written if any(value in path.read_text(errors="replace") for value in SECRETS.values())
    ]


def test_uncommitted_changes_are_recorded_without_them(home: Path) -> None:
    make = "git init -q; git config user.name a; git config user.email a@b; git add train.py; git commit -qm first"
    make += f"; echo 'key = \"{TOKEN}\"' > train.py"
    assert run(VICTIM, as_ordinary(VICTIM, "bash", "-euc", make), home).returncode == 0
    done = run(VICTIM, as_ordinary(VICTIM, sys.executable, "-P", "-c", SNAPSHOT), home, **SECRETS)
    assert '+key = "[$HF_TOKEN]"' in done.stdout and TOKEN not in done.stdout, done.stderr
