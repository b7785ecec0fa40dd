"""The same seed gives the same numbers, however many workers there are and wherever the models live."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.errors import EXIT_STOPPED
from tests.marks import long
from tests.rl.runs.jobs import Runs, metrics, same_metrics, series, stop_after
from tests.small_models.families import make_model
from tests.training.models.test_unpacked import KINDS as UNPACKED

OPTIONS = (
    "trainer.total_training_steps=3",
    "trainer.micro_tokens=100",  # two or three samples: several micro-batches per mini-batch
    "trainer.val_before_train=true",
    "algorithm.kl={where: reward, coef: 0.1}",
)


@pytest.fixture(scope="module")
def one_worker(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one")
    assert run(run_dir, *OPTIONS) == 0
    return run_dir


@pytest.mark.parametrize("sharding", ["full", long("gradients"), long("none")])
def test_two_workers_agree_with_one(run: Runs, tmp_path: Path, one_worker: Path, sharding: str) -> None:
    assert run(tmp_path, *OPTIONS, "trainer.n_gpus_per_node=2", f"trainer.sharding={sharding}") == 0
    same_metrics(tmp_path, one_worker)


def test_again_is_the_same(run: Runs, tmp_path: Path, one_worker: Path) -> None:
    assert run(tmp_path, *OPTIONS) == 0
    assert metrics(tmp_path) == metrics(one_worker)


def test_another_seed_is_not(run: Runs, tmp_path: Path, one_worker: Path) -> None:
    assert run(tmp_path, *OPTIONS, "trainer.seed=2") == 0
    assert metrics(tmp_path)[1]["actor/grad_norm"] != metrics(one_worker)[1]["actor/grad_norm"]


def test_shuffled_mini_batches_agree_too(run: Runs, tmp_path: Path, one_worker: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    shuffle = (*OPTIONS, "actor.shuffle=true", "algorithm.loss_agg=token-mean")
    assert run(one, *shuffle) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert run(two, *shuffle) == EXIT_STOPPED
    (two / "stop").unlink()
    assert run(two, *shuffle, "trainer.n_gpus_per_node=2") == 0
    same_metrics(two, one)
    for name in ("actor/grad_norm", "critic/grad_norm", "actor/lr"):
        values = [series(folder, name)[0] for folder in (one, one_worker)]
        assert values[0] == pytest.approx(values[1], rel=0.5)
        assert (values[0] == values[1]) == (name == "actor/lr")


def test_separate_pools_agree_with_a_shared_one(run: Runs, tmp_path: Path, one_worker: Path) -> None:
    pools = "pools={spec: {policy: [1], judges: [2]}, roles: {critic: judges, ref: judges}}"
    assert run(tmp_path, *OPTIONS, "trainer.n_gpus_per_node=3", pools) == 0
    same_metrics(tmp_path, one_worker)


def test_engines_in_a_pool_of_their_own_agree(run: Runs, tmp_path: Path, one_worker: Path) -> None:
    pools = "pools={spec: {train: [2], engines: [1]}, roles: {rollout: engines}}"
    assert run(tmp_path, *OPTIONS, "trainer.n_gpus_per_node=3", pools) == 0
    same_metrics(tmp_path, one_worker)


def test_layers_with_a_state_agree_with_the_engine(run: Runs, tmp_path: Path) -> None:
    """tests/models_table compares engine and trainer of every family."""
    model = make_model(tmp_path / "model", "qwen3_next")
    options = ("algorithm.advantage=grpo", f"model.path={model}", "rollout.calculate_log_probs=true")
    assert run(tmp_path / "run", *options) == 0
    found = series(tmp_path / "run", "training/rollout_probs_diff_max")
    assert len(found) == 2 and max(found) < 1e-6


@pytest.mark.parametrize("kind", ["llama4_text", *(long(kind) for kind in UNPACKED if kind != "llama4_text")])
def test_two_workers_agree_with_one_and_the_engine_without_packing(run: Runs, tmp_path: Path, kind: str) -> None:
    options = (
        *("algorithm.advantage=grpo", f"model.path={make_model(tmp_path / 'model', kind)}", "trainer.packing=false"),
        *(
            "rollout.calculate_log_probs=true",
            "algorithm.kl={where: loss, coef: 0.1, estimator: k3}",
            "actor.mini_batch_size=8",
        ),
    )
    assert run(tmp_path / "one", *options) == 0
    assert run(tmp_path / "two", *options, "trainer.n_gpus_per_node=2") == 0
    found = series(tmp_path / "two", "training/rollout_probs_diff_max")
    assert len(found) == 2 and max(found) < 1e-6
    same_metrics(tmp_path / "two", tmp_path / "one")
