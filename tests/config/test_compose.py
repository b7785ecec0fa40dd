import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.config.compose import compose, compose_partly, dump, load_config
from hpc_rl.config.keys import documented_keys
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.errors import UserError

REQUIRED = ["model.path=/model", "data.train_files=train.jsonl"]


def sft(*overrides: str, **flags: object) -> SftConfig:
    config = compose("sft", [*REQUIRED, *overrides], {key.replace("__", "."): v for key, v in flags.items()})
    assert isinstance(config, SftConfig)
    return config


def error_of(*overrides: str, job: str = "sft") -> str:
    with pytest.raises(UserError) as caught:
        compose(job, overrides)
    return str(caught.value)


def test_any_key_is_overridden_without_a_plus() -> None:
    config = sft(
        "trainer.total_epochs=3", "optim.betas=[0.8,0.9]", "slurm.sbatch.exclusive=null", "trainer.packing=false"
    )
    assert config.trainer.total_epochs == 3
    assert config.optim.betas == (0.8, 0.9)
    assert config.slurm.sbatch == {"exclusive": None}
    assert config.trainer.packing is False


def test_a_group_is_chosen_by_name_and_its_keys_can_be_overridden() -> None:
    config = compose("sft", ["model=qwen2.5-0.5b", "model.dtype=bfloat16", "data.train_files=a.jsonl"])
    assert isinstance(config, SftConfig)
    assert config.model.path == "Qwen/Qwen2.5-0.5B"
    assert config.model.dtype == "bfloat16"


def test_settings_win_over_overrides() -> None:
    assert sft("trainer.nnodes=2", trainer__nnodes=4).trainer.nnodes == 4


@pytest.mark.parametrize(
    ("override", "value"),
    [("slurm.account=0123", "0123"), ("slurm.constraint=node[01-04]", "node[01-04]"), ("slurm.mem='64G'", "64G"),
     ("slurm.time=24:00:00", "24:00:00"), ("slurm.partition=12_3", "12_3"), ("slurm.qos=a=b", "a=b")],
)  # fmt: skip
def test_text_arrives_as_it_was_typed(override: str, value: str) -> None:
    key = override.partition("=")[0].partition(".")[2]
    assert getattr(sft(override).slurm, key) == value


@settings(max_examples=25)
@given(
    st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(
        lambda t: t[0] not in "['\"" and t != "null" and not re.search(r"\$[\w{]", t)
    )
)
def test_any_text_of_an_environment_variable_arrives_intact(text: str) -> None:
    assert sft(f"slurm.env.X={text}").slurm.env == {"X": text}


def test_all_errors_are_reported_at_once_with_dotted_keys() -> None:
    lines = error_of("trainer.total_epoch=3", "optim.lr=fast", "trainer.nnodes=0").splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == [
        "data.train_files",
        "model.path",
        "optim.lr",
        "trainer.nnodes",
        "trainer.total_epoch",
    ]
    assert "trainer.total_epoch: unknown key; did you mean trainer.total_epochs?" in lines


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr=1", "did you mean optim.lr?"),
        ("trainer.n_gpu_per_node=8", "did you mean trainer.n_gpus_per_node?"),
        ("model=qwen9", "there is no model 'qwen9'; choose one of gemma3-1b, "),
        ("trainer.total_epochs", "write key=value"),
        ("trainer.total_epochs=[1", "trainer.total_epochs=[1"),
        ("trainer.micro_tokens=64", "raise micro_tokens or lower max_length"),
        ("data.prompt_key=question", "belong together"),
        ("slurm.time=tomorrow", "not a Slurm time"),
        ("slurm.sbatch.nodes=3", "use --nodes"),
        ("slurm.sbatch.Exclusive=1", "not a long option of sbatch"),
        ("slurm.env.1A=x", "not the name of an environment variable"),
        ("trainer.device=tpu", "'npu', 'xpu' or 'cpu'"),
    ],
)
def test_what_is_wrong_is_said(override: str, said: str) -> None:
    assert said in error_of(*REQUIRED, override)


def test_a_time_that_yaml_made_a_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft.yaml").write_text("slurm: {time: 24:00:00}\n")
    monkeypatch.chdir(tmp_path)
    message = error_of(*REQUIRED)
    assert message.startswith("configs/sft.yaml, line 1: slurm.time: 86400") and "quote it" in message


def test_a_line_break_in_an_sbatch_option_is_refused() -> None:
    with pytest.raises(UserError, match=r"slurm\.account.*line break"):
        sft(slurm__account="me\n#SBATCH --uid=0")


def test_a_recipe_in_the_working_folder_wins_and_the_shipped_groups_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    recipe = "defaults: [{model: qwen2.5-0.5b}, _self_]\ndata: {train_files: mine.jsonl}\ntrainer: {seed: 7}\n"
    (tmp_path / "configs" / "sft.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    config = compose("sft")
    assert isinstance(config, SftConfig)
    assert (config.trainer.seed, config.data.train_files, config.model.path) == (7, ["mine.jsonl"], "Qwen/Qwen2.5-0.5B")


def test_dump_and_load_keep_everything(tmp_path: Path) -> None:
    config = sft("slurm.env.X='a: b'", "slurm.sbatch.nice=10", "optim.lr=3e-4")
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load_config("sft", tmp_path / "config.yaml") == config


def test_load_names_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no configuration at"):
        load_config("sft", tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match="is not YAML"):
        load_config("sft", tmp_path / "bad.yaml")


def test_looking_at_a_configuration_needs_no_required_keys() -> None:
    config, missing = compose_partly("sft", ["optim.lr=1e-4"])
    assert missing == ["model.path", "data.train_files"]
    assert isinstance(config, SftConfig) and config.model.path == "???"


@pytest.mark.parametrize("job", sorted(KINDS))
def test_every_key_is_documented_with_a_default_that_yaml_reads_back(job: str) -> None:
    for key, type_name, default, meaning in documented_keys(KINDS[job].schema):
        assert meaning.endswith("."), f"{key} has no sentence about it"
        assert type_name
        if default != "required":
            yaml.safe_load(default)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml")))
def test_every_shipped_model_composes(path: Path) -> None:
    config = compose("sft", [f"model={path.stem}", "data.train_files=a.jsonl"])
    assert isinstance(config, SftConfig) and config.model.path


def test_a_key_of_the_actors_optimizer_leaves_its_learning_rate() -> None:
    required = ["model.path=/m", "data.train_files=a.jsonl", "reward.function=exact"]
    config = compose("ppo", [*required, "actor.optim.weight_decay=0.1"])
    assert isinstance(config, PpoConfig)
    assert (config.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert dict((key, default) for key, _, default, _ in documented_keys(PpoConfig))["actor.optim.lr"] == "1.0e-06"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"overrides": ["slurm.account=a${"]}, "slurm.account"),
        ({"overrides": ["slurm.env.X=${A} ${B"]}, "slurm.env.X"),
        ({"settings": {"slurm.partition": "${"}}, "slurm.partition"),
        ({"site": {"slurm.setup": ["true", "export A=${B"]}}, "slurm.setup"),
        ({"site": {"slurm.sbatch.comment": "${x"}}, "slurm.sbatch.comment"),
    ],
)
def test_an_unfinished_reference_is_refused(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(key)}: '.*' has an unfinished `\$\{{`: close it with }}"):
        compose("torchrun", **arguments)
    closed = compose("torchrun", site={"slurm.setup": ["export A=${B:-1}"], "slurm.env.X": "$ {"})
    assert (closed.slurm.setup, closed.slurm.env) == (["export A=${B:-1}"], {"X": "$ {"})


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("True", True), ("yes", True), ("1", True), ("FALSE", False), ("no", False), ("half", "half")],
)
def test_recomputation_is_a_switch_with_a_third_position(word: str, value: object) -> None:
    options = ["model.path=/m", "data.train_files=/t.jsonl", f"model.enable_gradient_checkpointing={word}"]
    assert compose("sft", options).model.enable_gradient_checkpointing == value


def test_an_unknown_section_is_named_by_the_keys_in_it() -> None:
    with pytest.raises(UserError) as error:
        compose("ppo", ["model.path=m", "data.train_files=a", "optim.clip_grad=1", "traner.nnodes=2"])
    assert "optim.clip_grad: unknown key; did you mean actor.optim.clip_grad or critic.optim.clip_grad?" in str(
        error.value
    )
    assert "traner.nnodes: unknown key; did you mean trainer.nnodes?" in str(error.value)


@pytest.mark.parametrize("value", ["tensorboard", "[console,mlflow]"])
def test_loggers_of_other_tools_point_at_what_exists(value: str) -> None:
    with pytest.raises(
        UserError, match=r"there is no logger \w+: choose 'console' or 'wandb', or both. .* hpc-rl metrics RUN --csv"
    ):
        compose("sft", ["model.path=m", "data.train_files=a", f"trainer.logger={value}"])
