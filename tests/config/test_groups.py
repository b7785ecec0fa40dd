"""Recipes and groups, of the user and shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.config import compose as composing
from hpc_rl.config import groups
from hpc_rl.config.compose import compose, compose_each
from hpc_rl.errors import UserError

REQUIRED = ["model.path=/model", "data.train_files=train.jsonl"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / "configs" / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


def test_own_and_shipped_choices_are_listed_together(project: Path) -> None:
    (project / "model" / "mine.yaml").write_text("path: /mine\n")
    assert {"mine", "qwen2.5-0.5b", "llama3.2-1b"} <= set(groups.choices("model"))
    assert {"model", "recipe", "algorithm"} <= groups.groups()


def test_an_own_choice_hides_a_shipped_one_of_the_same_name(project: Path) -> None:
    """Also if the job file is the shipped one."""
    assert compose("sft", ["model=qwen2.5-0.5b", REQUIRED[1]]).model.path == "Qwen/Qwen2.5-0.5B"  # type: ignore[attr-defined]
    (project / "model" / "qwen2.5-0.5b.yaml").write_text("path: /mine\n")
    assert compose("sft", ["model=qwen2.5-0.5b", REQUIRED[1]]).model.path == "/mine"  # type: ignore[attr-defined]


def test_the_recipe_for_a_number_of_nodes() -> None:
    assert [groups.recipe_for(nodes) for nodes in (1, 2, 3, 4)] == ["gsm8k-1node", "gsm8k-2nodes", None, "gsm8k-4nodes"]


def test_a_cycle_through_several_files_is_named(project: Path) -> None:
    (project / "recipe" / "a.yaml").write_text("defaults: [{/model: b}, _self_]\n")
    (project / "model" / "b.yaml").write_text("defaults: [../recipe/c, /recipe/a]\n")
    (project / "recipe" / "c.yaml").write_text("{}\n")
    with pytest.raises(UserError, match=r"one of recipe/a\.yaml, model/b\.yaml.* leads back to itself; correct its"):
        compose("ppo", ["recipe=a", *REQUIRED])


@pytest.mark.parametrize(
    ("job", "nodes", "command"),
    [
        ("sft", 2, "hpc-rl submit sft --nodes 2 model=qwen2.5-0.5b data.train_files=openai/gsm8k:main "
                   "data.prompt_key=question data.response_key=answer"),
        ("ppo", 4, "hpc-rl submit ppo --nodes 4 recipe=gsm8k-4nodes data.train_files=openai/gsm8k:main "
                   "data.prompt_key=question"),
        ("ppo", 3, "hpc-rl submit ppo --nodes 3 model.path=Qwen/Qwen2.5-0.5B-Instruct "
                   "data.train_files=openai/gsm8k:main data.prompt_key=question reward.function=gsm8k"),
    ],
)  # fmt: skip
def test_missing_keys_end_with_a_command_that_composes(job: str, nodes: int, command: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(job, [], {"trainer.nnodes": nodes})
    first, middle, last = str(caught.value).splitlines()
    assert first.startswith("model.path, data.train_files") and first.endswith("required, but not given")
    assert "`hpc-rl init`" in middle and last.strip() == command
    assert compose(job, command.split()[5:], {"trainer.nnodes": nodes}).trainer.nnodes == nodes


def test_missing_keys_keep_what_was_typed() -> None:
    with pytest.raises(UserError) as caught:
        compose("sft", ["model.path=/a b", "optim.lr=1e-4"], {"slurm.sbatch.nice": None})
    assert (
        str(caught.value)
        .splitlines()[-1]
        .startswith("  hpc-rl submit sft slurm.sbatch.nice=null 'model.path=/a b' optim.lr=1e-4 data.train_files=")
    )


def test_a_sweep_of_values_runs_hydra_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = composing._hydra_tree
    monkeypatch.setattr(composing, "_hydra_tree", lambda *given: calls.append(given) or original(*given))
    found = compose_each("sft", REQUIRED, [[f"trainer.seed={seed}"] for seed in range(1000)])
    assert [config.trainer.seed for config in found] == list(range(1000))  # type: ignore[attr-defined]
    assert len(calls) == 1
