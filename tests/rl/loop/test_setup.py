from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position
from hpc_rl.probes.tiny_model import make_tokenizer
from hpc_rl.rl.loop import setup
from hpc_rl.rl.loop.computed import ComputedColumns
from hpc_rl.run_dir import RunDir
from tests.rl.ppo_config import STALE, ppo_config
from tests.token_cache.test_cache import Stopping

TWO_UPDATES = "actor.ppo_epochs=2"
IN_REWARD = "algorithm.kl.where=reward"


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), "skip"),
        (("algorithm.kl={where: loss, estimator: k3}",), "skip"),
        ((TWO_UPDATES,), "rollout"),
        (("actor.mini_batch_size=4",), "rollout"),
        ((IN_REWARD,), "rollout"),
        ((TWO_UPDATES, "rollout.dtype=bfloat16"), "recompute"),
        ((TWO_UPDATES, "rollout.dtype=float32"), "rollout"),
        ((TWO_UPDATES, "model.dtype=bfloat16"), "recompute"),
        ((TWO_UPDATES, "rollout.name=vllm"), "recompute"),
        ((TWO_UPDATES, "trainer.device=cuda"), "recompute"),
        ((TWO_UPDATES, "trainer.device=cuda", "rollout.name=hf", "rollout.dtype=float32"), "recompute"),
        (("rollout.calculate_log_probs=true",), "recompute"),
        (("algorithm.tis_cap=2",), "recompute"),
        (("teacher.path=/teacher",), "rollout"),
        ((*STALE, "rollout.staleness=1"), "rollout"),
        ((*STALE, "rollout.staleness=1", "rollout.dtype=bfloat16"), "rollout"),
        ((*STALE, "rollout.staleness=4", "algorithm.tis_cap=2"), "recompute"),
    ],
)
def test_old_logprobs_are_computed_where_the_algorithm_needs_them(overrides: tuple[str, ...], expected: str) -> None:
    assert setup.old_logprobs(ppo_config(*overrides)) == expected


PARTS = "actor.mini_batch_size=4"
GRPO = "algorithm.advantage=grpo"
RECOMPUTED = (PARTS, GRPO, "rollout.calculate_log_probs=true")
IN_LOSS = "algorithm.kl={where: loss, estimator: k3}"
ALL = ("algorithm.advantage=gae", IN_LOSS, "teacher.path=/teacher")


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((GRPO,), {}),
        ((), {"values": ("critic", False)}),
        (RECOMPUTED, {"old_logprobs": ("actor", False)}),
        ((*STALE, *RECOMPUTED), {"old_logprobs": ("actor", True)}),
        ((*STALE, GRPO, "rollout.calculate_log_probs=true"), {"old_logprobs": ("actor", False)}),
        ((*STALE, PARTS, GRPO, "rollout.staleness=1", "algorithm.tis_cap=2"), {"old_logprobs": ("actor", False)}),
        ((*STALE, *RECOMPUTED, "transfer_queue.enable=true"), {"old_logprobs": ("actor", False)}),
        (
            (*STALE, *RECOMPUTED, *ALL, "pools.roles.ref=rollout"),
            {
                "old_logprobs": ("actor", True),
                "ref_logprobs": ("ref", False),
                "teacher_logprobs": ("teacher", True),
                "values": ("critic", True),
            },
        ),
        ((*STALE, PARTS, GRPO, "model.lora.rank=4", IN_LOSS), {"ref_logprobs": ("actor", True)}),
    ],
)
def test_columns_are_computed_during_generation_where_engines_have_other_gpus(
    overrides: tuple[str, ...], expected: dict[str, tuple[str, bool]]
) -> None:
    config = ppo_config(*overrides)
    found = setup.computed_columns(config, {role: role for role in config.roles})._computations  # type: ignore[misc]
    assert {name: (one.group, one.is_early) for name, one in found.items()} == expected
    assert all(one.method == {"old_logprobs": "logprobs"}.get(name, name) for name, one in found.items())
    assert [one.stays for one in found.values()] == [name not in setup.needed_by_driver(config) for name in found]


@pytest.mark.parametrize(
    "options, expected",
    [
        ((), set()),
        (("algorithm.kl.where=loss", "algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3"), set()),
        (("algorithm.kl.where=reward", "algorithm.kl.coef=0.1"), {"old_logprobs", "ref_logprobs"}),
        (("algorithm.tis_cap=2",), {"old_logprobs"}),
        (("rollout.calculate_log_probs=true",), {"old_logprobs"}),
        (("teacher.path=/teacher",), {"old_logprobs"}),
    ],
)
def test_columns_that_the_driver_needs(options: tuple[str, ...], expected: set[str]) -> None:
    assert setup.needed_by_driver(ppo_config(*options)) == expected | {"values", "teacher_logprobs"}


@pytest.mark.parametrize(
    "overrides, updates", [((), 1), ((TWO_UPDATES,), 2), (("actor.mini_batch_size=2", TWO_UPDATES), 8)]
)
def test_updates_of_a_step(overrides: tuple[str, ...], updates: int) -> None:
    assert setup.updates_per_step(ppo_config(*overrides)) == updates


def test_the_arithmetic_of_a_step_is_told() -> None:
    large = ("data.train_batch_size=256", "rollout.n=8", "actor.mini_batch_size=512", "actor.ppo_epochs=2")
    assert setup.describe_step(ppo_config(*large)) == (
        "each step: 256 prompts x 8 = 2,048 responses = 4 mini-batches of 512, x 2 epochs = 8 updates"
    )
    assert setup.describe_step(ppo_config()) == (
        "each step: 4 prompts x 2 = 8 responses = 1 mini-batch, x 1 epoch = 1 update"
    )


def test_prompts_of_files_with_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch has the shares of its whole batches: 9 prompts are two batches of 4."""
    files = {"a.jsonl": range(7), "b.jsonl": range(7, 9)}
    for name, numbers in files.items():
        rows = [json.dumps({"messages": str(number), "answer": number}) for number in numbers]
        (tmp_path / name).write_text("\n".join(rows))
    mixed = f"data.train_files={{{tmp_path}/b.jsonl: 3, {tmp_path}/a.jsonl: 1}}"
    tokenizer, run = make_tokenizer(300), RunDir(tmp_path / "run")
    train, val, mixture = setup.load_data(ppo_config(mixed), tokenizer, (), run, Stopping())  # type: ignore[arg-type]
    assert [prompt.answer for prompt in train] == [7, 8, 0, 1, 2, 3, 4, 5, 6] and not len(val)
    assert mixture == Mixture((2, 7), (6, 2))
    said = capsys.readouterr().out
    assert f"an epoch has 6 samples of {tmp_path}/b.jsonl (75.0%; each of its 2 is used 3 times); 2 samples" in said
    one = ppo_config(f"data.train_files={tmp_path}/a.jsonl")
    assert setup.load_data(one, tokenizer, (), run, Stopping())[2] is None  # type: ignore[arg-type]

    none: Any = None
    for overrides in ((), (*STALE, "rollout.staleness=1")):
        config = ppo_config(mixed, *overrides)
        computed = ComputedColumns({}, 0, 1)
        found: Any = setup.open_batches(config, train, none, none, none, Position(), 0, 4, None, computed, mixture)
        order = found._draws._order
        drawn = [next(order)[0] for _ in range(16)]
        assert drawn == [index for epoch in (0, 1) for index in mixture.order(config.trainer.seed, epoch, True)]
        of_a = [index for index in drawn if index > 1]
        assert len(set(of_a)) == len(of_a) == 4, "no prompt of a.jsonl is repeated before all others"
