"""Responses with observations: everything but the models' context is as if the observations were not there."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.algorithms.aggregation import LOSS_AGGREGATIONS
from hpc_rl.algorithms.estimators import ESTIMATORS
from hpc_rl.algorithms.kl import KL_ESTIMATORS
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.carriers.base import shards_of
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.loop.assignment import Shard
from hpc_rl.rl.loop.metrics import experience_metrics, has_signal, perf_metrics
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.rl.workers.packed_shard import pack_shard
from hpc_rl.training.models.causal_lm import Flops
from tests.rl.ppo_config import ppo_config

Masks = list[list[bool]]
masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=8).filter(any), min_size=1, max_size=6)
"""Whether the policy sampled the tokens of each response; the first and the last may be observations."""
COLUMNS = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
MEASURED = ("rollout.calculate_log_probs=true", "actor.mini_batch_size=4")
OVERLONG = ("algorithm.overlong_buffer=6", "algorithm.overlong_penalty=2")
DISCOUNTS = ("algorithm.gamma=0.9", "algorithm.lam=0.8")
TEACHER = ("teacher.path=/teacher", "teacher.coeff=0.5")


@cache
def config_of(*overrides: str) -> PpoConfig:
    return ppo_config(*overrides)


def completions_of(masks: Masks, seed: int, removed: bool) -> list[Completion]:
    """Random responses, in which observations have mask and number, or are removed."""
    rng = np.random.default_rng(seed)
    found = []
    for row in masks:
        mask = np.array(row)
        ids = rng.integers(5, 300, len(row), np.int32)
        logprobs = np.where(mask, -rng.random(len(row)), 0).astype(np.float32)
        finished = bool(rng.integers(2))
        if removed:
            found.append(Completion(ids[mask], logprobs[mask], finished))
        else:
            found.append(Completion(ids, logprobs, finished, mask=None if mask.all() else mask))
    return found


def experience_of(masks: Masks, seed: int, config: PpoConfig, removed: bool) -> TensorDict:
    """Everything that a step computes before its updates, from random numbers in place of models and reward."""
    completions = completions_of(masks, seed, removed)
    prompts = [np.full(2 + index % 3, 7, np.int32) for index in range(len(masks))]
    experience = columns.new_experience(prompts, [index // 2 for index in range(len(masks))], completions)
    generator = torch.Generator().manual_seed(seed)
    sampled = sum(map(sum, masks))
    for name in COLUMNS:
        experience[name] = columns.jagged(-torch.rand(sampled, generator=generator), columns.lengths(experience))
    scores_B = torch.randint(3, (len(masks),), generator=generator).float()
    greedy_B = torch.randint(3, (len(masks),), generator=generator).float()
    if len(masks) > 2:
        scores_B[1] = torch.nan
    columns.add_scores(experience, scores_B, config, greedy_B)
    columns.add_rewards(experience, config.algorithm, 0.3)
    columns.add_advantages(experience, config.algorithm, greedy_B, config.teacher.coeff)
    return experience


def group_of(experience: TensorDict, micro_tokens: int, ranks: int = 1) -> tuple[WorkerGroup, list[Shard]]:
    """A group without processes that has assigned the responses, and what each rank receives."""
    group = WorkerGroup.__new__(WorkerGroup)
    group._workers, group._trainer = [None] * ranks, TrainingConfig()
    group.row_tokens, group.longest_row = micro_tokens, 0
    assignment = group._assign(experience, None)
    group._held = (assignment, columns.lengths(experience))
    return group, shards_of(experience, assignment)


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    if first.is_nested:
        assert torch.equal(first.offsets(), second.offsets())
        first, second = first.values(), second.values()
    assert torch.equal(first, second)


def compare(masks: Masks, seed: int, *overrides: str) -> None:
    """Compare everything that a step computes with the observations, and without them."""
    config = config_of(*MEASURED, *overrides)
    found, expected = (experience_of(masks, seed, config, removed) for removed in (False, True))
    assert ("response_mask" in found) == (not all(map(all, masks)))
    for name in set(expected.keys()) - {"response_ids"}:
        same(found[name], expected[name])
    order = np.random.default_rng(seed).permutation(len(masks))
    for columns_of in (trainer.actor_columns, *([trainer.critic_columns] if "returns" in expected else [])):
        ours, theirs = columns_of(found, config, order), columns_of(expected, config, order)
        assert ours.keys() == theirs.keys()
        for name, column in ours.items():
            same(column, theirs[name])
    assert str(experience_metrics(found, config)) == str(experience_metrics(expected, config))  # equal, also if NaN
    assert has_signal(found, config.algorithm) == has_signal(expected, config.algorithm)


OPTIONS = [
    *([f"algorithm.advantage={name}", *(TEACHER if name == "opd" else DISCOUNTS)] for name in ESTIMATORS),
    *(["algorithm.advantage=grpo", f"algorithm.scale_rewards={scale}"] for scale in ("batch", "none")),
    *([f"algorithm.kl={{where: reward, coef: 0.3, estimator: {name}}}"] for name in KL_ESTIMATORS if name != "k3+"),
    ["algorithm.kl={where: loss, coef: 0.3, estimator: k3+}", "algorithm.entropy_coeff=0.01"],
    *([f"algorithm.loss_agg={name}", "algorithm.mask_truncated=true"] for name in LOSS_AGGREGATIONS),
    *([f"algorithm.tis_level={level}", "algorithm.tis_cap=2"] for level in ("token", "sequence", "geometric")),
    ["algorithm.tis_level=geometric", "algorithm.tis_bounds=[0.9,1.2]"],
    [*OVERLONG],
]


@pytest.mark.parametrize("overrides", OPTIONS, ids=" ".join)
@settings(max_examples=25)
@given(masks, st.integers(0, 2**32))
def test_a_step_is_as_if_the_observations_were_not_there(overrides: list[str], masks: Masks, seed: int) -> None:
    compare(masks, seed, *overrides)


@given(masks, st.integers(0, 2**32))
def test_sampled_tokens_are_the_targets_and_all_tokens_are_context(masks: Masks, seed: int) -> None:
    _, (shard,) = group_of(experience_of(masks, seed, config_of(*MEASURED), removed=False), micro_tokens=24)
    held = pack_shard(shard, torch.device("cpu"))
    completions = completions_of(masks, seed, removed=False)
    rows: list[NDArray[np.int32]] = []
    for micro in held.micro_batches():
        assert micro.batch.targets_N.tolist() == micro.batch.input_ids_T[micro.batch.rows_N + 1].tolist()
        assert int(micro.lengths_B.sum()) == len(micro.batch.targets_N) == micro.tokens.stop - micro.tokens.start
        rows += [part.numpy() for part in micro.batch.input_ids_T.split(micro.batch.lengths)]
    asked = [np.full(2 + index % 3, 7, np.int32) for index in range(len(masks))]
    wanted = [np.append(prompt, c.token_ids).tolist() for prompt, c in zip(asked, completions, strict=True)]
    assert sorted(row.tolist() for row in rows) == sorted(wanted)
    assert held.tokens == sum(map(sum, masks))


def two_turns() -> TensorDict:
    """Responses of 5 tokens and 1; the third and fourth are an observation."""
    ids, logprobs = np.arange(6, dtype=np.int32), -np.arange(6, dtype=np.float32)
    mask = np.array([True, True, False, False, True])
    completions = [Completion(ids[:5], logprobs[:5] * mask, True, mask=mask), Completion(ids[5:], logprobs[5:], True)]
    return columns.new_experience([np.full(2, 7, np.int32)] * 2, [0, 0], completions)


def test_the_columns_of_two_turns_by_hand() -> None:
    experience = two_turns()
    assert [row.tolist() for row in experience["response_ids"].unbind()] == [[0, 1, 2, 3, 4], [5]]
    assert [row.tolist() for row in experience["response_mask"].unbind()] == [[True, True, False, False, True], [True]]
    assert [row.tolist() for row in experience["rollout_logprobs"].unbind()] == [[0, -1, -4], [-5]]
    assert columns.lengths(experience).tolist() == [3, 1]
    assert columns.all_lengths(experience).tolist() == [7, 3]


def test_gae_of_two_turns_by_hand() -> None:
    # Values 1, 2 and, after the observation, 4; score 3; gamma and lambda 0.5, each once per sampled token:
    # errors 0 + 0.5*2 - 1 = 0,  0 + 0.5*4 - 2 = 0,  3 - 4 = -1;  returns 1 - 1/16, 2 - 1/4, 4 - 1. Second: 1.
    experience, config = two_turns(), ppo_config("algorithm.gamma=0.5", "algorithm.lam=0.5")
    experience["values"] = columns.jagged(torch.tensor([1.0, 2.0, 4.0, 0.5]), columns.lengths(experience))
    columns.add_scores(experience, torch.tensor([3.0, 1.0]), config)
    columns.add_rewards(experience, config.algorithm, 0.0)
    columns.add_advantages(experience, config.algorithm, None)
    assert columns.flat(experience, "rewards").tolist() == [0, 0, 3, 1]
    assert columns.flat(experience, "returns").tolist() == [0.9375, 1.75, 3.0, 1.0]


def test_weights_and_penalties_of_two_turns_by_hand() -> None:
    experience = two_turns()
    columns.add_scores(experience, torch.zeros(2), ppo_config("algorithm.overlong_buffer=6"))
    # Free up to 2 of at most 8 tokens, then a sixth of the penalty 1 for each.
    assert experience["scores"].tolist() == pytest.approx([-1 / 6, 0])
    expected = {
        "token-mean": [1 / 4] * 4,
        "seq-mean-token-mean": [1 / 6] * 3 + [1 / 2],
        "seq-mean-token-sum": [1 / 2] * 4,
        "seq-mean-token-sum-norm": [1 / 16] * 4,
    }
    assert expected.keys() == LOSS_AGGREGATIONS.keys()
    for name, weights in expected.items():
        found = columns.loss_weights(experience, ppo_config(), name)
        assert found.values().tolist() == pytest.approx(weights)


def test_the_greedy_baseline_is_penalised_by_its_sampled_tokens() -> None:
    zeros, mask = np.zeros(7, np.int32), np.array([True, True, True, False, True, False, True])
    greedy = [Completion(zeros, zeros.astype(np.float32), True, mask=each) for each in (mask, None)]
    scored: Any = SimpleNamespace(values=np.ones(2, np.float32))
    batch: Any = SimpleNamespace(
        greedy=SimpleNamespace(completions=greedy, scored=Pending.known(scored)), groups=[0, 1]
    )
    config = ppo_config("algorithm.advantage=remax", "algorithm.overlong_buffer=4", "algorithm.overlong_penalty=2")
    found = trainer.greedy_scores(batch, config)  # 5 and 7 tokens of at most 8: 1/4 and 3/4 of the penalty
    assert found is not None and found.tolist() == [0.5, -0.5]


def test_speed_counts_all_tokens_that_were_computed() -> None:
    memory = SimpleNamespace(max_memory_gb=lambda: Pending.known(1.0), size=2)
    flops = Flops(per_token=1.0, per_target=100.0, per_squared_token=0.0)
    config = ppo_config("actor.ppo_epochs=1")
    state: Any = SimpleNamespace(
        **{"total_tokens": 100, "gpus": 2, "actor": memory, "critic": None, "peak": 0.5, "flops": flops},
        config=config,
    )
    found = perf_metrics(two_turns(), {"timing_s/update_actor": 2.0}, state)
    assert (found["perf/total_num_tokens"], found["perf/tokens_per_s"]) == (110.0, 5.0)
    assert found["perf/mfu/actor"] == (10 + 4 * 100) / 2.0 / 2 / 0.5
