"""Shipped recipes and documented commands: what the files and the pages say has to compose."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpc_rl.cli import app
from hpc_rl.cli.submit import SlurmFlags
from hpc_rl.config.compose import compose, compose_partly, documented_keys
from hpc_rl.config.roles import roles_in_use
from hpc_rl.config.schema import SCHEMAS, JobConfig, PpoConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "rl.md", ROOT / "docs" / "containers.md"]
GSM8K_ROWS = 7473
NO_KEYS = {"container.sh", "ray.init()", "ray.sbatch.j2", "trainer.json"}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


def ppo(*overrides: str) -> PpoConfig:
    config = compose("ppo", ["data.train_files=a.jsonl", *overrides])
    assert isinstance(config, PpoConfig)
    return config


def nodes_of(recipe: str) -> int:
    return int(re.fullmatch(r".*-(\d+)nodes?", recipe)[1])  # type: ignore[index]


@pytest.mark.parametrize("algorithm", [None, *names("algorithm")])
@pytest.mark.parametrize("recipe", names("recipe"))
def test_every_recipe_goes_with_every_algorithm(recipe: str, algorithm: str | None) -> None:
    config = ppo(f"recipe={recipe}", *([f"algorithm={algorithm}"] if algorithm else []))
    responses = config.data.train_batch_size * config.rollout.n
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert config.trainer.nnodes == nodes_of(recipe)
    assert config.actor.mini_batch_size is not None
    assert responses % config.actor.mini_batch_size == 0 and responses // config.actor.mini_batch_size == 4
    assert config.actor.mini_batch_size % ranks == 0, "every rank has as many responses as the others"
    assert config.data.train_batch_size * 10 <= GSM8K_ROWS
    assert ("critic" in roles_in_use(config)) == (algorithm is None)


@pytest.mark.parametrize("recipe", names("recipe"))
def test_the_first_recipe_lists_the_arithmetic_of_all(recipe: str) -> None:
    config = ppo(f"recipe={recipe}")
    prompts, n, mini = config.data.train_batch_size, config.rollout.n, config.actor.mini_batch_size
    steps = GSM8K_ROWS // prompts
    table = " ".join((ROOT / "configs" / "recipe" / "gsm8k-1node.yaml").read_text().split())
    assert f"{recipe} {prompts} x {n} = {prompts * n:,} {mini:,} {steps}" in table


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


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each `hpc-rl ...` and `python -m hpc_rl.rl.main_ppo ...` in a block of code."""
    for page in PAGES:
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"hpc-rl |python -m hpc_rl", line.strip()):
                    yield page.name, shlex.split(line, comments=True)


@pytest.mark.parametrize(("page", "words"), list(documented_commands()), ids=lambda value: str(value)[:80])
def test_documented_commands_are_understood(page: str, words: list[str]) -> None:
    if words[0] == "python":
        assert isinstance(compose("ppo", words[3:]), PpoConfig)
        return
    own, _, program = " ".join(map(shlex.quote, words[1:])).partition(" -- ")
    name, *arguments = shlex.split(own)
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    if name == "config" and "--help" in arguments:
        return
    found = command.make_context(name, arguments).params
    if name == "submit":
        flags = SlurmFlags(**{key: value for key, value in found.items() if key in SlurmFlags.__dataclass_fields__})
        config = compose(found["kind"], found["arguments"] or [], flags.settings())
        assert isinstance(config, JobConfig)
        assert bool(program) == (found["kind"] in ("torchrun", "ray"))
    elif name == "config":
        compose_partly(found["kind"], found["overrides"] or [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_keys_exist(page: Path) -> None:
    options = [(key, kind) for schema in SCHEMAS.values() for key, kind, *_ in documented_keys(schema)]
    keys = {key for key, _ in options}
    tables = {key for key, kind in options if kind.startswith("dict")}
    sections = {key.partition(".")[0] for key in keys}
    words = {word for text in re.findall(r"`([^`\n]+)`", page.read_text()) for word in text.split()}
    written = {key for word in words if "." in (key := word.partition("=")[0].strip("'\""))}
    written = {key for key in written if key.partition(".")[0] in sections and "/" not in key}
    unknown = {key for key in written - keys if key.rpartition(".")[0] not in tables}
    assert written and unknown <= NO_KEYS


def test_every_metric_of_the_loop_is_documented() -> None:
    sources = [path.read_text() for path in (ROOT / "hpc_rl" / "rl").glob("*.py")]
    groups = "actor|critic|perf|val|training|response_length|prompt_length"
    metrics = {name for text in sources for name in re.findall(rf'"((?:{groups})/[\w/]+)"', text)}
    metrics |= {f"timing_s/{name}" for text in sources for name in re.findall(r'clock\("(\w+)"\)', text)}
    page = (ROOT / "docs" / "rl.md").read_text()
    missing = {name for name in metrics if f"`{name}`" not in page and f"`{name.rpartition('/')[2]}`" not in page}
    assert len(metrics) > 30 and not missing
