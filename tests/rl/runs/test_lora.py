"""Runs with adapters: the same numbers however the work is split, and failures if adapters do not reach the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpc_rl.errors import RunError
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.workers.worker import Worker
from hpc_rl.training.models.lora import is_adapter
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.rl.rollout.vllm.test_engine import needs_vllm
from tests.rl.runs.jobs import Runs, metrics, same_metrics, samples, series, stop_after

LORA = (
    "model.lora.rank=4",
    *("actor.optim.lr=2e-2", "critic.optim.lr=1e-2", "algorithm.kl={where: reward, coef: 0.1}"),
    *("trainer.total_training_steps=3", "trainer.val_before_train=true", "trainer.export=true"),
)
NO_REWARD = ("reward.function=null", "reward.kwargs={}")
ENGINE_POOL = ("trainer.n_gpus_per_node=3", "pools={spec: {train: [2], engines: [1]}, roles: {rollout: engines}}")


@pytest.fixture(scope="module")
def one_worker(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one")
    assert run(run_dir, *LORA) == 0
    return run_dir


def base_of(run: Runs) -> str:
    return next(option for option in run.base if option.startswith("model.path=")).partition("=")[2]


def test_the_reference_is_the_policy_without_its_adapters(one_worker: Path) -> None:
    penalties = series(one_worker, "actor/reward_kl_penalty")
    assert penalties[0] == pytest.approx(0, abs=1e-7)
    assert penalties[2] > 1e-4
    assert series(one_worker, "actor/kl_coef") == [0.1] * 3


@pytest.mark.parametrize(
    "split",
    [
        long(("trainer.n_gpus_per_node=2",)),
        long(("trainer.n_gpus_per_node=2", "trainer.sharding=none", "model.enable_gradient_checkpointing=true")),
        ENGINE_POOL,
    ],
    ids=["sharded", "replicated", "engine in another process"],
)
def test_every_split_gives_the_same_numbers(
    run: Runs, tmp_path: Path, one_worker: Path, split: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *LORA, *split) == 0
    same_metrics(tmp_path, one_worker)
    said = capsys.readouterr().out
    assert "before the first update, the engine's probabilities equal those of the model without adapters" in said
    assert "the engine's log-probabilities moved together with the policy's (slope 1.000" in said
    exported, expected = (AutoModelForCausalLM.from_pretrained(path / "model") for path in (tmp_path, one_worker))
    base = AutoModelForCausalLM.from_pretrained(base_of(run)).state_dict()
    for name, weight in exported.state_dict().items():
        torch.testing.assert_close(weight, expected.state_dict()[name], atol=1e-4, rtol=1e-3)
        assert torch.equal(weight, base[name]) == ("_proj" not in name or name.endswith("bias")), name


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        (("algorithm.advantage=grpo", "algorithm.kl={where: loss, estimator: k3, coef: 0.1}"), "actor/kl_loss"),
        long(("algorithm.advantage=remax",), "actor/reward_kl_penalty"),
        long(("algorithm.advantage=opd", "algorithm.kl.where=none", *NO_REWARD), "actor/teacher_kl"),
    ],
    ids=["grpo", "remax", "opd"],
)
def test_algorithms_without_a_critic(
    run: Runs, tmp_path: Path, options: tuple[str, ...], measured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters reach the engine, and the reference is the policy without them."""
    teacher = f"teacher.path={make_tiny_model(tmp_path / 'teacher', hidden=48)}"
    own = [*options, *([teacher] if measured == "actor/teacher_kl" else [])]
    assert run(tmp_path / "run", *LORA, *own, "trainer.total_training_steps=2", "trainer.export=false") == 0
    assert "the engine's log-probabilities moved together with the policy's (slope 1.000" in capsys.readouterr().out
    assert all(norm > 0 for norm in series(tmp_path / "run", "actor/grad_norm"))
    assert abs(series(tmp_path / "run", measured)[-1]) > 1e-4


def test_resuming_is_exact_and_needs_no_second_check(
    run: Runs, tmp_path: Path, one_worker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert run(tmp_path, *LORA, "trainer.n_gpus_per_node=2") == 75
    capsys.readouterr()
    (tmp_path / "stop").unlink()
    assert run(tmp_path, *LORA) == 0
    said = capsys.readouterr().out
    assert "before the first update" not in said
    assert "moved together" in said
    same_metrics(tmp_path, one_worker)
    assert [row["response"] for row in samples(tmp_path)] == [row["response"] for row in samples(one_worker)]
    sizes = {
        part.name: sum(file.stat().st_size for file in part.glob("*.distcp")) for part in checkpoint_parts(tmp_path)
    }
    adapters = load_file(next(Path(base_of(run)).glob("*.safetensors")))
    assert sizes.keys() == {"actor", "critic"}
    whole = sum(weight.numel() * 4 * 3 for weight in adapters.values())
    assert all(size < whole for size in sizes.values())


def checkpoint_parts(run_dir: Path) -> list[Path]:
    newest = max((run_dir / "checkpoints").glob("step-????????"))
    return [path for path in newest.iterdir() if path.is_dir()]


def test_a_run_continues_from_adapters(
    run: Runs, tmp_path: Path, one_worker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "first", *LORA, "model.lora.merge=false", "trainer.total_training_steps=1") == 0
    folder = tmp_path / "first" / "model"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == base_of(run)
    capsys.readouterr()
    more = (f"model.lora.path={folder}", "trainer.total_training_steps=1")
    assert run(tmp_path / "second", *LORA[1:], *more, *ENGINE_POOL) == 0
    said = capsys.readouterr().out
    assert "before the first update" not in said
    assert "moved together" in said
    assert series(tmp_path / "second", "actor/reward_kl_penalty")[0] > 1e-4  # the reference has no adapters


def drop_adapters(worker: Worker) -> None:
    worker._parts["sender"]._source.adapted = {}


def send_other_weights(worker: Worker) -> None:
    source = worker._parts["sender"]._source
    kept = type(source).__iter__

    class Other(type(source)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return ((name, weight * 3) for name, weight in kept(self))

    source.__class__ = Other


def send_zeros(worker: Worker) -> None:
    source = worker._parts["sender"]._source
    kept = type(source).__iter__

    class Other(type(source)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return ((name, weight * 0) for name, weight in kept(self))

    source.__class__ = Other


def break_on(state: Any, fault: Any) -> None:
    """Change something in the processes of the policy's workers."""
    import ray

    ray.get([worker.__ray_call__.remote(fault) for worker in state.actor._workers], timeout=600)


def test_a_transfer_that_drops_adapters_ends_the_run(run: Runs, tmp_path: Path) -> None:
    with run.state(tmp_path, *LORA, *ENGINE_POOL) as state:
        break_on(state, drop_adapters)
        with pytest.raises(RunError, match=r"engine's log-probabilities have moved by -?0\.0\d times the policy's"):
            trainer.train(state)
    assert [step["step"] for step in metrics(tmp_path)] == [0, 1]


def test_a_transfer_of_wrong_weights_ends_the_run_before_the_first_update(run: Runs, tmp_path: Path) -> None:
    with run.state(tmp_path, *LORA, *ENGINE_POOL) as state:
        break_on(state, send_other_weights)
        state.rollout.sync()
        with pytest.raises(RunError, match="the engine's probabilities differ from those of the model without"):
            trainer.train(state)
    assert [step["step"] for step in metrics(tmp_path)] == [0]


def test_adapters_that_change_something_at_the_start_end_the_run(run: Runs, tmp_path: Path) -> None:
    def disturb(worker: Worker) -> None:
        with torch.no_grad():
            for name, parameter in worker.actor.model.hf.named_parameters():
                if ".lora_B." in name:
                    parameter.add_(0.5)

    with run.state(tmp_path, *LORA) as state:
        break_on(state, disturb)
        with pytest.raises(RunError, match="but the policy's probabilities differ from those of the model without"):
            trainer.train(state)


@needs_vllm
@pytest.mark.long
def test_vllm_computes_with_the_adapters_alone(run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both checks of adapters succeed, and nothing but adapters is sent."""
    with run.state(tmp_path / "run", *LORA, *ENGINE_POOL, *on_vllm(tmp_path)) as state:
        assert all(map(is_adapter, sent_names(state)))
        assert trainer.train(state) == 0
    said = capsys.readouterr().out
    assert "before the first update, the engine's probabilities equal those of the model without adapters" in said
    assert "the engine's log-probabilities moved together with the policy's (slope 1.0" in said
    assert [step["step"] for step in metrics(tmp_path / "run")] == [0, 1, 2, 3]


@pytest.mark.long
@needs_vllm
@pytest.mark.slow
def test_adapters_that_do_not_reach_vllm_end_the_run(run: Runs, tmp_path: Path) -> None:
    with run.state(tmp_path / "run", *LORA, *ENGINE_POOL, *on_vllm(tmp_path)) as state:
        break_on(state, send_zeros)
        with pytest.raises(RunError, match=r"engine's log-probabilities have moved by -?0\.0\d times the policy's"):
            trainer.train(state)


def on_vllm(folder: Path) -> list[str]:
    """Return options of a run with vLLM, which supports no heads of size 16 on CPUs."""
    model = make_tiny_model(folder / "model", hidden=64, num_attention_heads=2, num_key_value_heads=2)
    return [f"model.path={model}", "rollout.name=vllm", "rollout.merge_lora=false"]


def sent_names(state: Any) -> list[str]:
    import ray

    def names(worker: Worker) -> list[str]:
        return list(worker._parts["sender"]._source.parameters)

    found: list[str] = ray.get(state.actor._workers[0].__ray_call__.remote(names), timeout=600)
    return found
