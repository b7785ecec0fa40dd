"""What another user can put into a folder that both users can write is not followed by commands in that folder.

The folder is open to everybody, as of a careless group, or has a file or a subfolder of the other user.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.users import INTRUDER, VICTIM, as_ordinary, hpc_rl, run

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root"),
]
TEMPLATE = "{{ ''.__class__.__mro__ }}#!/bin/bash\n"
NOT_USED = "is not used, because it could be the work of another user"
DRY = ("submit", "torchrun", "--dry-run", "--nodes", "1", "--run-dir", "../runs/one", "--", "train.py")
SFT = ("submit", "sft", "--dry-run", "--run-dir", "../runs/one", "model.path=../m", "data.train_files=../d.jsonl")
PPO = ("submit", "ppo", "--dry-run", "--run-dir", "../runs/one", "model.path=../m", "data.train_files=../d.jsonl")
RAY = ("submit", "ray", "--dry-run", "--nodes", "1", "--run-dir", "../runs/one", "--")
PLANTED = {
    "a template": ("slurm_templates/torchrun.sbatch.j2", TEMPLATE, DRY, "template slurm_templates/torchrun.sbatch.j2"),
    "a part of a template": ("slurm_templates/job.sbatch.j2", TEMPLATE, DRY, "template slurm_templates/job.sbatch.j2"),
    "a site profile": ("site.yaml", "slurm: {setup: [touch ran]}\n", DRY, "site profile ./site.yaml"),
    "a site by name": (
        "configs/site/ours.yaml",
        "slurm: {setup: [x]}\n",
        (*DRY[:2], "--site", "ours", *DRY[2:]),
        "ours",
    ),
    "a job file": ("configs/sft.yaml", "slurm: {setup: [touch ran]}\n", SFT, "configs/sft.yaml"),
    "a recipe": (
        "configs/recipe/mine.yaml",
        "# @package _global_\n",
        (*PPO, "recipe=mine"),
        "configs/recipe/mine.yaml",
    ),
    "a pipeline": ("configs/pipeline/p.yaml", "stages: {}\n", ("chain", "--dry-run", "p"), "configs/pipeline/p.yaml"),
    "a reward": ("own.py", "def score(r, a): return 1\n", (*PPO, "reward.function=own.py:score"), "own.py"),
    "a module": ("own.py", "def score(r, a): return 1\n", (*PPO, "reward.function=own:score"), "own.py"),
    "a tool": (
        "own.py",
        "def f(a: int): '''.'''\n",
        (*PPO, "environment.tools=[own.py:f]", "reward.function=exact"),
        "own.py",
    ),
    "an agent": ("go.py", "", (*PPO, "agent.command=[python,go.py]", "agent.endpoint=loopback"), "go.py"),
    "a program": ("train.py", "", DRY, "program train.py"),
    "a driver": ("drive.py", "", (*RAY, "python", "drive.py"), "program drive.py"),
    "a module of a driver": ("pkg/run.py", "", (*RAY, "python", "-m", "pkg.run"), "the folder in which Python looks"),
    "a module of ranks": ("pkg/run.py", "", (*DRY[:-1], "-m", "pkg.run"), "the folder in which -m looks"),
    "settings of wandb": ("wandb/settings", "[default]\n", (*SFT, "trainer.logger=[wandb]"), "wandb/settings"),
    "an image": ("image.sif", "", (*SFT, "container.image=image.sif"), "container.image image.sif"),
}
"""What is planted -> file, content, the victim's command, and how the message begins."""


@pytest.fixture
def home() -> Iterator[Path]:
    """The victim's home, which has a folder `project`."""
    with tempfile.TemporaryDirectory(prefix="hpc-rl-folder-", dir="/var/tmp") as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "project").mkdir()
        (home / "project" / "train.py").touch()
        for path in [home, *home.rglob("*")]:
            os.chown(path, VICTIM, VICTIM)
        yield home


def plant(home: Path, file: str, content: str, uid: int) -> None:
    """Write a file as one of the users."""
    write = f'mkdir -p "$(dirname {file})"; rm -f {file}; printf %s "$CONTENT" > {file}'
    done = run(uid, as_ordinary(uid, "sh", "-euc", write), home, folder=home / "project", CONTENT=content)
    assert done.returncode == 0, done.stderr


def refused(home: Path, words: tuple[str, ...]) -> str:
    done = run(VICTIM, hpc_rl(VICTIM, *words), home, folder=home / "project")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert not (home / "runs").exists() and not list(home.rglob("ran"))
    return done.stderr


@pytest.mark.parametrize("name", PLANTED)
def test_what_another_user_has_planted_is_refused(home: Path, name: str) -> None:
    file, content, words, said = PLANTED[name]
    (home / "project").chmod(0o777)
    plant(home, file, content, INTRUDER)
    text = refused(home, words)
    line = next(line for line in text.splitlines() if NOT_USED in line)
    assert said in line and f"{home}/project can be changed by all users" in line


@pytest.mark.parametrize("name", PLANTED)
def test_the_users_own_files_are_not_refused(home: Path, name: str) -> None:
    file, content, words, _ = PLANTED[name]
    plant(home, file, content, VICTIM)
    done = run(VICTIM, hpc_rl(VICTIM, *words), home, folder=home / "project")
    assert NOT_USED not in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["owner", "link", "mode", "group"])
def test_each_way_to_write_a_file_counts(home: Path, how: str) -> None:
    """The folder is closed again, or only the file or a group can be written."""
    plant(home, "configs/sft.yaml", "slurm: {setup: [touch ran]}\n", VICTIM)
    file = home / "project" / "configs" / "sft.yaml"
    if how == "owner":
        os.chown(file, INTRUDER, INTRUDER)
    elif how == "link":
        theirs = Path(tempfile.mkdtemp(prefix="hpc-rl-theirs-", dir=home)) / "sft.yaml"
        file.rename(theirs)
        os.chown(theirs.parent, INTRUDER, INTRUDER)
        theirs.parent.chmod(0o755)
        file.symlink_to(theirs)
        os.lchown(file, VICTIM, VICTIM)
    elif how == "mode":
        file.chmod(0o666)
    else:
        os.chown(file.parent, VICTIM, INTRUDER)
        file.parent.chmod(0o775)
    assert NOT_USED in refused(home, SFT)


def test_a_group_that_the_user_trusts(home: Path) -> None:
    """slurm.group on the command line, or in the user's own profile, but never in the file in question."""
    plant(home, "configs/sft.yaml", "slurm: {group: daemon}\n", VICTIM)
    folder = home / "project" / "configs"
    subprocess.run(["chgrp", "-R", "daemon", folder], check=True)
    folder.chmod(0o775)
    assert NOT_USED in refused(home, SFT)
    done = run(VICTIM, hpc_rl(VICTIM, *SFT, "slurm.group=daemon"), home, folder=home / "project")
    assert NOT_USED not in done.stderr, done.stderr
    profile = home / ".config" / "hpc-rl" / "site.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("slurm: {group: daemon}\n")
    done = run(VICTIM, hpc_rl(VICTIM, *SFT), home, folder=home / "project")
    assert NOT_USED not in done.stderr, done.stderr


def test_templates_run_in_a_sandbox(home: Path) -> None:
    """A template of the user's own cannot reach Python's objects: it may come from an archive."""
    escape = "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}"
    plant(home, "slurm_templates/torchrun.sbatch.j2", escape, VICTIM)
    assert "template slurm_templates/torchrun.sbatch.j2, line 1" in refused(home, DRY)
