"""Models and data sets for jobs without internet: downloads from a hub of ours, and the jobs after them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.submission.hub import fetch_environment, hub_cache
from hpc_rl.submission.script.environment import job_environment
from tests import helpers
from tests.data.hub_server import HubServer, hub_server
from tests.helpers import make_tiny_model, write_chats
from tests.tracking.wandb_server import wandb_server

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """One model, with its weights in a second format too, and one data set."""
    folder = tmp_path_factory.mktemp("hub")
    make_tiny_model(folder / "model")
    (folder / "model" / "pytorch_model.bin").write_text("the same weights once more")
    (folder / "data" / "main").mkdir(parents=True)
    (folder / "data" / "README.md").write_text(CARD)
    write_chats(folder / "data" / "main" / "train.jsonl", 8)
    write_chats(folder / "data" / "main" / "test.jsonl", 2)
    models = {"me/Tiny": folder / "model", "me/Gated": folder / "model"}
    with hub_server(models, {"me/SumsHard": folder / "data"}) as server:
        server.gated.add("me/Gated")
        yield server


def hpc_rl(folder: Path, hub: HubServer, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "WANDB_"))}
    environ = {**outside, "HF_ENDPOINT": hub.url, "HOME": str(folder), "OMP_NUM_THREADS": "1", **environ}
    return helpers.hpc_rl(*words, folder=folder, environ=environ)


SFT = ("sft", "trainer.device=cpu", "model.path=me/Tiny", "data.train_files=me/SumsHard:main", "cache.hf_home=hf")
OFFLINE = "cache.offline=true"
WANDB = "trainer.logger=[console,wandb]"


@pytest.mark.slow
def test_a_job_without_internet_trains_on_what_was_fetched(tmp_path: Path, hub: HubServer) -> None:
    early = hpc_rl(tmp_path, hub, "submit", *SFT, OFFLINE, "--local")
    assert early.returncode == 2 and not (tmp_path / "runs").exists()
    where = tmp_path / "hf"
    assert early.stderr.splitlines() == [
        f"hpc-rl: model.path me/Tiny is not a path here and not in the cache {where}/hub, and compute nodes are "
        "offline (cache.offline): correct the path, or run hpc-rl fetch me/Tiny",
        "hpc-rl: data.train_files: data set me/SumsHard:main is not a path here and not in the cache "
        f"{where}/datasets, and compute nodes are offline (cache.offline): correct the path, or run hpc-rl fetch "
        "me/SumsHard:main",
    ]
    fetched = hpc_rl(tmp_path, hub, "fetch", "me/Tiny", "me/SumsHard:main", "cache.hf_home=hf", HF_HUB_OFFLINE="1")
    assert fetched.returncode == 0, fetched.stderr
    model, data = fetched.stdout.splitlines()
    assert model.startswith("model me/Tiny: ") and f"in {where}/hub/models--me--Tiny/snapshots/" in model
    assert data.startswith(f"data set me/SumsHard:main: train 8, test 2 rows in {where}/datasets/me___sums_hard/main/")
    assert not any("pytorch_model.bin" in request for request in hub.asked)
    hub.asked.clear()
    job = ("submit", *SFT, OFFLINE, "--local", "--job-name", "mine", "data.train_batch_size=4", WANDB)
    done = hpc_rl(tmp_path, hub, *job, "trainer.total_training_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "mine" / "model" / "model.safetensors").exists()
    assert hub.asked == [], "the job asked the hub"
    with wandb_server() as wandb:
        login = {"WANDB_BASE_URL": wandb.url, "WANDB_API_KEY": "0" * 40}
        synced = hpc_rl(tmp_path, hub, "wandb", "sync", "mine", **login)
    assert synced.returncode == 0, synced.stderr
    [history] = wandb.history.values()
    steps = [line["step"] for _, line in sorted(history.items())]
    assert list(dict.fromkeys(steps)) == [1, 2]


def test_the_job_script_says_where_the_cache_is_and_that_it_is_all(tmp_path: Path, hub: HubServer) -> None:
    script = hpc_rl(tmp_path, hub, "submit", *SFT, "cache.wandb_dir=/scratch/w", "--dry-run").stdout
    assert f"export HF_HOME={tmp_path}/hf\n" in script and "HF_HUB_OFFLINE" not in script
    assert "export WANDB_CACHE_DIR=/scratch/w/cache\n" in script
    config = compose("ray", ["cache.offline=true", "slurm.env.WANDB_MODE=online"])
    assert job_environment(config) == {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "online"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["me/none"], "has no model and no data set me/none that you may read"),
        (["me/Gated"], "me/Gated is gated: accept its terms"),
        (["cache.offline=true"], "no model or data set is named"),
        (["me/Tiny", "cache.hf_homes=x"], "did you mean cache.hf_home?"),
        (["me/Tiny", "cache.hf_home=/dev/null/hf"], "cannot fetch me/Tiny from"),
    ],
)
def test_what_cannot_be_fetched_is_a_line(tmp_path: Path, hub: HubServer, words: list[str], said: str) -> None:
    done = hpc_rl(tmp_path, hub, "fetch", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert [line[:8] for line in done.stderr.splitlines() if line.startswith("hpc-rl: ")] == ["hpc-rl: "]


def test_a_hub_that_cannot_be_reached_is_a_line(tmp_path: Path, hub: HubServer) -> None:
    done = hpc_rl(tmp_path, hub, "fetch", "me/Tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2 and "cannot fetch me/Tiny from http://127.0.0.1:9: " in done.stderr
    assert done.stderr.rstrip().endswith("set https_proxy, or copy the cache from a machine with internet")


def test_a_download_that_was_cut_off_is_found(tmp_path: Path, hub: HubServer) -> None:
    (tmp_path / "site.yaml").write_text("cache: {hf_home: hf}\n")
    assert hpc_rl(tmp_path, hub, "fetch", "me/Tiny").returncode == 0
    cache = hub_cache(compose("torchrun", [OFFLINE, f"cache.hf_home={tmp_path}/hf"]))
    snapshot = cache.model_folder("me/Tiny")
    assert snapshot is not None
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b-00002-of-00002.safetensors"}}')
    (tmp_path / "train.jsonl").write_text("")
    words = ["submit", *SFT, OFFLINE, "--dry-run"]
    assert "is incomplete: b-00002-of-00002.safetensors missing in" in hpc_rl(tmp_path, hub, *words).stderr
    (snapshot / "model.safetensors").resolve().unlink()
    done = hpc_rl(tmp_path, hub, *words)
    assert "has no weights (*.safetensors or *.bin): hpc-rl fetch me/Tiny" in done.stderr


def test_places_of_the_cache_follow_the_environment() -> None:
    def models(**environ: str) -> str:
        return str(hub_cache(compose("sft", [], {**NEEDED, "cache.hf_home": None}), environ).models)

    assert models(HF_HOME="/a", HF_HUB_CACHE="/b") == "/b"
    assert models(HF_HOME="/a") == "/a/hub"
    assert models(XDG_CACHE_HOME="/x") == "/x/huggingface/hub"
    config = compose("torchrun", ["cache.hf_home=/shared/hf", "cache.offline=true"])
    assert str(hub_cache(config, {"HF_HOME": "/a"}).datasets) == "/shared/hf/datasets"
    environ = fetch_environment(config, {"HF_HOME": "/a", "HF_HUB_OFFLINE": "1"})
    assert environ["HF_HOME"] == "/shared/hf" and environ["HF_TOKEN_PATH"] == "/a/token"
    assert "HF_HUB_OFFLINE" not in environ


NEEDED = {"model.path": "me/Tiny", "data.train_files": ["train.jsonl"]}
