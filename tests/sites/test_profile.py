"""Layers of site profiles, and the errors of invalid ones."""

from pathlib import Path

import pytest
import yaml

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import UserError
from hpc_rl.sites import profile as profiles

SITES = Path(__file__).parents[2] / "configs" / "site"


@pytest.fixture(autouse=True)
def own_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all layers, so that this machine's own profiles have no effect."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(profiles, "SYSTEM", tmp_path / "system.yaml")
    monkeypatch.setattr(profiles, "USER", tmp_path / "user.yaml")
    return tmp_path


def error_of(text: str) -> list[str]:
    Path("site.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        profiles.load_profile(environ={})
    return str(caught.value).splitlines()


def test_the_later_layer_wins_key_by_key_and_every_value_knows_its_line(own_layers: Path) -> None:
    (own_layers / "system.yaml").write_text(
        "slurm:\n  partition: all\n  account: none\n  qos: low\n  time: '1:00:00'\n"
    )
    (own_layers / "user.yaml").write_text(
        "# mine\nslurm:\n  account: me\n  env: {HF_HOME: /hf, A: user}\n  qos: high\n"
    )
    Path("site.yaml").write_text("slurm: {account: project, env: {A: project}}\n")
    Path("flag.yaml").write_text("slurm:\n  qos: null\n")
    profile = profiles.load_profile("flag.yaml", environ={})
    config = compose("torchrun", ["slurm.time=2:00:00"], {"slurm.partition": "flag"}, profile.values)
    slurm = config.slurm
    assert (slurm.partition, slurm.account, slurm.qos, slurm.time) == ("flag", "project", None, "2:00:00")
    assert slurm.env == {"HF_HOME": "/hf", "A": "project"}
    lines = {key: (origin.file.name, origin.line) for key, origin in profile.origins.items()}
    assert lines == {
        "slurm.partition": ("system.yaml", 2),
        "slurm.time": ("system.yaml", 5),
        "slurm.env.HF_HOME": ("user.yaml", 4),
        "slurm.account": ("site.yaml", 1),
        "slurm.env.A": ("site.yaml", 1),
        "slurm.qos": ("flag.yaml", 2),
    }
    assert [(layer.name, layer.found) for layer in profile.layers] == [
        ("system-wide", True),
        ("user", True),
        ("project", True),
        ("--site", True),
    ]


def test_a_recipe_knows_its_job_better_than_the_profile(own_layers: Path) -> None:
    (own_layers / "user.yaml").write_text('slurm: {time: "24:00:00", partition: gpu, setup: [a]}\n')
    Path("configs").mkdir()
    Path("configs/torchrun.yaml").write_text('slurm: {time: "1:00:00", setup: [b]}\n')
    slurm = compose("torchrun", site=profiles.load_profile(environ={}).values).slurm
    assert (slurm.time, slurm.partition, slurm.setup) == ("1:00:00", "gpu", ["b"])
    Path("configs/torchrun.yaml").write_text("slurm:\n")  # a section without keys takes nothing away
    assert compose("torchrun", site=profiles.load_profile(environ={}).values).slurm.partition == "gpu"


def test_the_environment_names_the_system_wide_layer(own_layers: Path) -> None:
    (own_layers / "system.yaml").write_text("slurm: {partition: all}\n")
    (own_layers / "other.yaml").write_text("slurm: {qos: other}\n")
    assert profiles.load_profile(environ={"HPC_RL_SITE": str(own_layers / "other.yaml")}).values == {
        "slurm.qos": "other"
    }
    assert profiles.load_profile(environ={"HPC_RL_SITE": "typed-gres"}).values["slurm.gpu_option"] == "gres"
    with pytest.raises(UserError, match=r"\$HPC_RL_SITE: site profile /no/file: there is no such file"):
        profiles.load_profile(environ={"HPC_RL_SITE": "/no/file"})


def test_a_name_is_looked_up_in_the_working_folder_first() -> None:
    assert profiles.find("whole-nodes") == SITES / "whole-nodes.yaml"
    Path("configs/site").mkdir(parents=True)
    Path("configs/site/whole-nodes.yaml").write_text("")
    assert profiles.find("whole-nodes") == Path("configs/site/whole-nodes.yaml").absolute()
    with pytest.raises(UserError, match=r"does not exist; the shipped profiles are .*typed-gres"):
        profiles.find("nowhere")
    with pytest.raises(UserError, match="no such home folder"):
        profiles.find("~nobody-of-this-name/site.yaml")


def test_keys_that_a_kind_of_job_does_not_have_are_left_out() -> None:
    Path("site.yaml").write_text("slurm: {qos: q}\ntrainer: {wandb_mode: offline}\nray: {first_port: 20000}\n")
    profile = profiles.load_profile(environ={})
    assert compose("torchrun", site=profile.values).slurm.qos == "q"
    required = ["model.path=/m", "data.train_files=a.jsonl", "reward.function=exact"]
    config = compose("ppo", required, site=profile.values)
    assert isinstance(config, PpoConfig)
    assert (config.trainer.wandb_mode, config.ray.first_port, config.slurm.qos) == ("offline", 20000, "q")


def test_all_that_is_wrong_is_named_with_file_line_and_nearest_key() -> None:
    text = """slurm:
  partion: gpu
  account: 0123
  time: 24:00:00
  cpus_per_gpu: lots
  sbatch: {Exclusive: 1}
  leave_out: [nodes]
  node: 8
  gpu_type: "a100:4"
optim: {lr: 1e-4}
trainer: {total_epochs: 3}
slurmm: {partition: gpu}
ray:
"""
    said = [
        "slurm.partion: unknown key; did you mean slurm.partition?",
        "slurm.account: Input should be a valid string, found 83: quote it",
        "slurm.time: 86400 is a number: YAML reads an unquoted 24:00:00 as 86400",
        "slurm.cpus_per_gpu: expected a whole number",
        "slurm.sbatch: 'Exclusive' is not a long option of sbatch",
        "slurm.leave_out.0: Input should be 'job-name'",
        "slurm.node: Input should be",
        "slurm.gpu_type: String should match",
        "optim.lr: belongs to a job",
        "trainer.total_epochs: belongs to a job",
        "slurmm.partition: unknown key; did you mean slurm.partition?",
        "ray: a section, which needs keys below it",
    ]
    found = error_of(text)
    assert len(found) == len(said)
    for line, (number, words) in zip(found, enumerate(said, 2), strict=True):
        assert line.startswith(f"site.yaml, line {number}: {words}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slurm: [", "site.yaml, line 1: not valid YAML"),
        ("slurm:\n  qos: a\n  qos: b\n", "site.yaml, line 3: slurm.qos is already set in line 2"),
        ("slurm: &a\n  node: *a\n", "site.yaml, line 1: not valid YAML: an alias contains itself"),
        ("- slurm\n", "a profile has sections with keys"),
        ("slurm: gpu\n", "site.yaml, line 1: slurm: a section, which needs keys below it, such as slurm.job_name"),
        ("slurm:\n  time: 2026-13-01\n", "site.yaml, line 2: slurm.time: month must be in 1..12"),
        ("slurm: {sbatch: {exclusive: true}}", "line 1: slurm.sbatch: exclusive is true: write null"),
    ],
)
def test_what_is_no_profile_is_one_line(text: str, said: str) -> None:
    (line,) = error_of(text)
    assert said in line


def test_an_empty_profile_is_none() -> None:
    Path("site.yaml").write_text("# nothing yet\n")
    assert profiles.load_profile(environ={}).values == {}


def test_what_several_keys_make_wrong_is_left_to_the_whole() -> None:
    Path("site.yaml").write_text("slurm: {time: '2', mem: 64G, mem_option: none}\n")
    profile = profiles.load_profile(environ={})
    with pytest.raises(UserError, match=r"slurm\.mem_option=none: leave mem out"):
        compose("torchrun", ["slurm.warning_s=30"], site=profile.values)
    assert compose("torchrun", ["slurm.warning_s=30", "slurm.mem=null"], site=profile.values).slurm.time == "2"


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_profile_fits_every_kind_of_job(path: Path) -> None:
    assert yaml.safe_load(path.read_text())
    profile = profiles.load_profile(path.stem, environ={})
    for kind in ("torchrun", "ray"):
        assert compose(kind, site=profile.values).slurm.partition == profile.values["slurm.partition"]
