"""Shipped recipes: what the files say has to compose."""

import re
from pathlib import Path

import pytest

from hpc_rl.config.compose import compose, compose_partly
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.config.training.preferences import DpoConfig, RmConfig

ROOT = Path(__file__).parents[2]
GSM8K_ROWS = 7473


VERL = "gsm8k-verl"
"""The settings of another project's example, which tests/test_docs.py compares with docs/from-verl.md."""


PREFERENCES = {"ultrafeedback-dpo": "dpo", "ultrafeedback-dpo-lora": "dpo", "ultrafeedback-rm": "rm"}
DISTILLATION = "gsm8k-distill"
"""Recipes of other kinds of jobs."""
GENERATE = "gsm8k-generate"
CALCULATOR = "calculator"
"""A small example that `make demo-tools` runs."""


def names(group: str) -> list[str]:
    others = {VERL, DISTILLATION, GENERATE, CALCULATOR, *PREFERENCES}
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml") if path.stem not in others)


def ppo(*overrides: str) -> PpoConfig:
    config = compose("ppo", ["data.train_files=a.jsonl", *overrides])
    assert isinstance(config, PpoConfig)
    return config


def nodes_of(recipe: str) -> int:
    return int(re.fullmatch(r".*-(\d+)nodes?", recipe)[1])  # type: ignore[index]


@pytest.mark.parametrize("algorithm", [None, *names("algorithm")])
@pytest.mark.parametrize("recipe", names("recipe"))
def test_every_recipe_goes_with_every_algorithm(recipe: str, algorithm: str | None) -> None:
    teacher = ["teacher.path=teacher"] if algorithm == "opd" else []
    config = ppo(f"recipe={recipe}", *([f"algorithm={algorithm}"] if algorithm else []), *teacher)
    responses = config.data.train_batch_size * config.rollout.n
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert config.trainer.nnodes == nodes_of(recipe)
    assert config.actor.mini_batch_size is not None
    assert responses % config.actor.mini_batch_size == 0 and responses // config.actor.mini_batch_size == 4
    assert config.actor.mini_batch_size % ranks == 0, "every rank has as many responses as the others"
    assert config.data.train_batch_size * 10 <= GSM8K_ROWS
    assert ("critic" in config.roles) == (algorithm is None)


@pytest.mark.parametrize("recipe", names("recipe"))
def test_the_first_recipe_lists_the_arithmetic_of_all(recipe: str) -> None:
    config = ppo(f"recipe={recipe}")
    prompts, n, mini = config.data.train_batch_size, config.rollout.n, config.actor.mini_batch_size
    steps = GSM8K_ROWS // prompts
    table = " ".join((ROOT / "configs" / "recipe" / "gsm8k-1node.yaml").read_text().split())
    assert f"{recipe} {prompts} x {n} = {prompts * n:,} {mini:,} {steps}" in table


@pytest.mark.parametrize(("recipe", "kind"), PREFERENCES.items())
def test_recipes_of_preferences(recipe: str, kind: str) -> None:
    config = compose(kind, [f"recipe={recipe}", "data.train_files=a.jsonl"])
    assert isinstance(config, DpoConfig | RmConfig)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert config.data.train_batch_size % ranks == 0 and config.data.max_length == 2048


@pytest.mark.parametrize("kind", ["generate", "eval"])
def test_the_recipe_of_generation(kind: str) -> None:
    config = compose(kind, [f"recipe={GENERATE}"])
    assert isinstance(config, GenerateConfig)
    assert (config.rollout.n, config.reward.function, config.data.prompt_key) == (16, "gsm8k", "question")


def test_the_recipe_of_the_calculator_needs_no_other_reward() -> None:
    config = ppo(f"recipe={CALCULATOR}", "model.path=small")
    assert config.environment.is_used and config.scores and not config.reward.sources
    assert config.environment.max_turns == 2 and config.rollout.n > 1


def test_model_and_algorithm_win_over_the_recipe() -> None:
    config = ppo("recipe=gsm8k-2nodes", "model=qwen2.5-1.5b", "algorithm=dapo", "algorithm.clip_ratio_high=0.3")
    assert config.model.path == "Qwen/Qwen2.5-1.5B"
    assert (config.algorithm.filter_groups, config.algorithm.clip_ratio_high) == (True, 0.3)
    assert config.algorithm.tis_cap == 2.0, "what the recipe says and the algorithm does not stays"


def test_a_recipe_of_ones_own_builds_on_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    own = "# @package _global_\ndefaults: [gsm8k-2nodes, _self_]\ndata: {train_batch_size: 1024}\n"
    (tmp_path / "configs" / "recipe" / "mine.yaml").write_text(own)
    shipped = (ROOT / "configs" / "ppo.yaml").read_text().replace("recipe: null", "recipe: mine")
    (tmp_path / "configs" / "ppo.yaml").write_text(shipped)
    monkeypatch.chdir(tmp_path)
    config = ppo()
    assert (config.data.train_batch_size, config.actor.mini_batch_size, config.rollout.n) == (1024, 1024, 8)


def test_every_metric_of_the_loop_is_documented() -> None:
    sources = [path.read_text() for path in (ROOT / "hpc_rl" / "rl").rglob("*.py")]
    groups = "actor|critic|environment|perf|val|training|response_length|prompt_length"
    metrics = {name for text in sources for name in re.findall(rf'"((?:{groups})/[\w/]+)"', text)}
    metrics |= {f"timing_s/{name}" for text in sources for name in re.findall(r'clock\("(\w+)"\)', text)}
    page = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("rl-jobs", "generation"))
    missing = {name for name in metrics if f"`{name}`" not in page and f"`{name.rpartition('/')[2]}`" not in page}
    assert len(metrics) > 30 and not missing


def test_the_recipe_of_distillation() -> None:
    config = compose("distill", [f"recipe={DISTILLATION}", "data.train_files=a.jsonl"])
    assert isinstance(config, DistillConfig)
    assert config.trainer.nnodes == 1 and config.teacher.path != config.model.path
    assert config.data.train_batch_size % config.trainer.n_gpus_per_node == 0


def test_a_distillation_without_models_can_be_looked_at() -> None:
    _, missing = compose_partly("distill", ["data.train_files=a.jsonl"])
    assert missing == ["model.path", "teacher.path"]
