"""`hpc-rl init`: the commands that it names work in the folder that it makes, as they are typed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import make_tiny_model

HPC_RL = [sys.executable, "-m", "hpc_rl.cli"]


def hpc_rl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HPC_RL, *words], cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter")
    make_tiny_model(folder / "model")
    done = hpc_rl(folder, "init", "project", "--model", "model")
    assert done.returncode == 0, done.stderr
    assert "hpc-rl submit sft --nodes 2\n  hpc-rl submit ppo --nodes 4\n" in done.stdout
    return folder / "project"


@pytest.mark.parametrize(
    ("words", "nodes"), [("submit sft --nodes 2", 2), ("submit ppo --nodes 4", 4), ("submit sft --test", 1)]
)
def test_the_commands_work_as_typed(project: Path, words: str, nodes: int) -> None:
    done = hpc_rl(project, *words.split(), "--dry-run", "trainer.device=cpu")
    assert done.returncode == 0, done.stderr
    assert f"#SBATCH --nodes={nodes}\n" in done.stdout
    assert not (project / "runs").exists()


def test_the_reward_of_the_starter_project(project: Path) -> None:
    scores: dict[str, object] = {}
    exec((project / "rewards.py").read_text(), scores)
    score = scores["score"]
    assert callable(score)
    assert [score(text, "22") for text in ("17 + 5 = 22", "22.", "222", "", "the answer is -22", "22 or 23")] == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]


def test_nothing_is_replaced(project: Path) -> None:
    done = hpc_rl(project, "init")
    assert done.returncode == 2
    assert (
        "README.md, configs/sft.yaml, configs/ppo.yaml" in done.stderr and "init never replaces a file" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_made(project: Path) -> None:
    done = hpc_rl(project, "init", "README.md/below")
    assert done.returncode == 2 and "cannot write" in done.stderr
