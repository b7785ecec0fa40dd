from __future__ import annotations

import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop.metrics import (
    NO_SIGNAL_REPEAT,
    NO_SIGNAL_STEPS,
    experience_metrics,
    has_signal,
    no_signal_warning,
    not_before,
    reward_metrics,
    rollout_metrics,
    sampler_warning,
    timeline,
)
from hpc_rl.training.perf import Clock, Spans
from tests.rl.loop.test_experience import experience_of
from tests.rl.ppo_config import STALE, ppo_config

GRPO = ("algorithm.advantage=grpo", "rollout.n=2")


def scored(scores: list[float], groups: list[int], lengths: list[int] | None = None) -> TensorDict:
    """An experience with GRPO's advantages."""
    experience = experience_of(lengths or [2] * len(scores))
    experience["group"] = torch.tensor(groups)
    config = ppo_config(*GRPO)
    columns.add_scores(experience, torch.tensor(scores), config)
    columns.add_rewards(experience, config.algorithm, 0.0)
    columns.add_advantages(experience, config.algorithm, None)
    return experience


def measured(scores: list[float], groups: list[int], lengths: list[int] | None = None) -> dict[str, float]:
    return experience_metrics(scored(scores, groups, lengths), ppo_config(*GRPO))


def test_deviation_of_scores_within_prompts() -> None:
    # Prompts 0 and 2 have equal scores; the sample deviation of (0, 1) is sqrt(1/2), that of (1, 2, 3) is 1.
    found = measured([0.1, 0.1, 0.0, 1.0, 0.7, 0.7, 0.7, 1.0, 2.0, 3.0], [0, 0, 1, 1, 2, 2, 2, 3, 3, 3])
    assert found["reward_std"] == pytest.approx((math.sqrt(0.5) + 1) / 4)
    assert found["frac_reward_zero_std"] == 0.5


def test_equal_scores_everywhere() -> None:
    found = measured([0.1] * 6, [0, 0, 0, 1, 1, 1])
    assert (found["reward_std"], found["frac_reward_zero_std"]) == (0.0, 1.0)


def test_one_response_per_prompt_has_no_deviation() -> None:
    found = measured([0.0, 1.0, 2.0], [0, 1, 2])
    assert "reward_std" not in found and "frac_reward_zero_std" not in found
    # A single response beside others is left out.
    assert measured([5.0, 1.0, 1.0], [0, 1, 1])["frac_reward_zero_std"] == 1.0


def test_percentiles_of_lengths() -> None:
    found = measured([0.0] * 5, [0] * 5, lengths=[1, 2, 3, 4, 6])
    expected = {"mean": 3.2, "max": 6, "min": 1, "p10": 1.4, "p50": 3, "p90": 5.2}
    for name, value in expected.items():
        assert found[f"response_length/{name}"] == pytest.approx(value)
        assert found[f"prompt_length/{name}"] == 2


def test_each_component_of_a_reward_is_averaged_over_the_responses_that_have_it() -> None:
    values = np.zeros(3, np.float32)
    scores = Scores(values, [(1, "broken")], [{"format": 1.0, "correct": 0.0}, {}, {"format": 0.0}])
    assert reward_metrics(scores) == {"critic/reward_errors": 1.0, "reward/format": 0.5, "reward/correct": 0.0}
    assert reward_metrics(Scores(values, [])) == {"critic/reward_errors": 0.0}


def test_signal_means_that_an_advantage_is_not_zero() -> None:
    algorithm = ppo_config(*GRPO).algorithm
    assert not has_signal(scored([0.1, 0.1, 0.7, 0.7], [0, 0, 1, 1]), algorithm)
    assert has_signal(scored([0.1, 0.1, 0.7, 0.8], [0, 0, 1, 1]), algorithm)


def test_tokens_that_are_left_out_of_the_loss_give_no_signal() -> None:
    experience = scored([0.1, 0.1, 0.7, 0.8], [0, 0, 1, 1], lengths=[2, 2, 6, 6])  # those of 6 tokens were cut
    assert has_signal(experience, ppo_config(*GRPO).algorithm)
    assert not has_signal(experience, ppo_config(*GRPO, "algorithm.mask_truncated=true").algorithm)
    experience["old_logprobs"] = experience["rollout_logprobs"]
    assert has_signal(experience, ppo_config(*GRPO, "algorithm.tis_bounds=[0.5,2]").algorithm)
    assert not has_signal(experience, ppo_config(*GRPO, "algorithm.tis_bounds=[1.5,2]").algorithm)


def test_responses_without_a_score_are_left_out_of_all_means() -> None:
    config, experience = ppo_config(), experience_of([2, 2, 2])
    columns.add_scores(experience, torch.tensor([1.0, torch.nan, 3.0]), config)
    experience["values"] = columns.repeat(torch.tensor([0.5, 100.0, 1.5]), experience)
    columns.add_rewards(experience, config.algorithm, 0.0)
    columns.add_advantages(experience, config.algorithm, None)
    found = experience_metrics(experience, config)
    assert found["critic/values/mean"] == 1.0
    kept = torch.cat([experience[name].unbind()[row] for name in ("returns", "advantages") for row in (0, 2)])
    assert found["critic/returns/mean"] == pytest.approx(float(kept[:4].mean()))
    assert found["critic/advantages/mean"] == pytest.approx(float(kept[4:].mean()), abs=1e-6)
    assert found["critic/vf_explained_var"] > -10  # a value of 100 where there is no return would be far worse


def test_truncated_probabilities_are_not_compared() -> None:
    def names(*overrides: str) -> set[str]:
        experience = scored([0.0, 1.0], [0, 0])
        experience["old_logprobs"] = experience["rollout_logprobs"]
        found = experience_metrics(experience, ppo_config(*GRPO, "rollout.calculate_log_probs=true", *overrides))
        return {name for name in found if "probs_diff" in name}

    assert len(names()) == len(names("rollout.top_k=4")) == len(names("algorithm.tis_cap=2")) == 3
    assert not names("rollout.top_k=4", "algorithm.tis_cap=2")
    assert not names("rollout.top_p=0.9", "algorithm.tis_bounds=[0.5,2]")


def test_weights_of_a_correction_are_measured() -> None:
    """The engine's log-probability of each token is 0.5 more than the trainer's."""
    experience = scored([0.0, 1.0], [0, 0])
    experience["old_logprobs"] = columns.jagged(
        columns.flat(experience, "rollout_logprobs") - 0.5, columns.lengths(experience)
    )
    plain = experience_metrics(experience, ppo_config(*GRPO))
    assert not [name for name in plain if "is_weight" in name or "rollout_" in name]
    compared = experience_metrics(experience, ppo_config(*GRPO, "rollout.calculate_log_probs=true"))
    assert compared["training/rollout_log_ratio"] == pytest.approx(0.5) and "training/is_weight/mean" not in compared
    for stale in ((), (*STALE, "rollout.staleness=1")):
        found = experience_metrics(experience, ppo_config(*GRPO, "algorithm.tis_cap=0.5", *stale))
        assert found["training/rollout_log_ratio"] == pytest.approx(0.5)
        assert found["training/rollout_probs_diff_mean"] > 0
        assert found["training/is_weight/mean"] == 0.5  # the ratio is exp(-0.5), over the cap
        assert (found["training/is_weight/capped"], found["training/is_weight/rejected"]) == (1.0, 0.0)
        assert found["training/is_weight/ess"] == pytest.approx(1.0)


def test_a_warning_after_several_steps_without_signal_and_then_now_and_then() -> None:
    metrics = measured([0.0] * 4, [0, 0, 1, 1])
    warned = [steps for steps in range(60) if no_signal_warning(steps, metrics)]
    assert warned == [NO_SIGNAL_STEPS, NO_SIGNAL_STEPS + NO_SIGNAL_REPEAT, NO_SIGNAL_STEPS + 2 * NO_SIGNAL_REPEAT]
    assert warned[0] == 3


def test_the_warning_describes_what_was_found() -> None:
    alike = no_signal_warning(3, measured([0.0] * 4, [0, 0, 1, 1]))
    assert alike is not None
    assert alike.startswith("warning: the last 3 steps gave no learning signal")
    assert "because every response scored 0." in alike and "algorithm.filter_groups=true" in alike
    per_prompt = no_signal_warning(3, measured([0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]))
    assert per_prompt is not None and "because the responses to each prompt all scored the same." in per_prompt
    left_out = no_signal_warning(3, measured([0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]))
    assert left_out is not None and "tokens whose advantages are not 0 are left out of the loss" in left_out


def test_a_teacher_without_a_reward() -> None:
    """The mean of the log ratio over scored tokens, and nothing about scores."""
    config = ppo_config("algorithm.advantage=opd", "teacher.path=/teacher", "reward.function=null")
    experience = experience_of([1, 3])
    columns.add_scores(experience, torch.tensor([0.0, torch.nan]), config)
    for name, values in {"old_logprobs": [-1.0, -2.0], "teacher_logprobs": [-1.5, -9.0]}.items():
        experience[name] = columns.repeat(torch.tensor(values), experience)
    columns.add_rewards(experience, config.algorithm, 0.0)
    columns.add_advantages(experience, config.algorithm, None, 1.0)
    metrics = experience_metrics(experience, config)
    assert metrics["actor/teacher_kl"] == 0.5 and metrics["critic/advantages/mean"] == -0.5
    assert not [name for name in metrics if "score" in name or "reward" in name]
    warning = no_signal_warning(3, metrics)
    assert warning is not None and "the policy and the teacher give the same probabilities" in warning


def test_a_sampler_that_differs_from_the_trainer_is_a_warning() -> None:
    assert sampler_warning({}, 0) is None
    assert sampler_warning({"training/rollout_probs_diff_mean": 0.01, "actor/ppo_kl": 1.0}, 0) is None
    warning = sampler_warning({"training/rollout_probs_diff_mean": 0.02}, 0)
    assert warning is not None and "by 0.020 on average (threshold: 0.01)" in warning


def test_a_sampler_that_is_too_old_is_a_warning() -> None:
    """Its probabilities differ anyway; with a correction the KL of the updates begins after the step before."""
    differs = {"training/rollout_probs_diff_mean": 0.5}
    assert sampler_warning({**differs, "training/rollout_log_ratio": 0.05, "actor/ppo_kl": 0.2}, 4) is None
    for metrics in ({"training/rollout_log_ratio": 0.06, "actor/ppo_kl": 0.0}, {"actor/ppo_kl": 0.06}):
        warning = sampler_warning(metrics, 4)
        assert warning is not None and "is 0.06 nats per token" in warning
        assert "Lower actor.optim.lr or rollout.staleness (4)" in warning


def test_the_timeline_of_a_step_has_what_all_parts_did_since_its_start() -> None:
    clock, engines, rewards, trainer = Clock(), Spans(), Spans(), Spans()
    began = clock.began = time.perf_counter() - 20
    engines.add("gen", began - 3, began + 8)
    rewards.add("reward", began - 3, began - 1)  # of the step before
    for spans, phase, start, end in (
        (engines, "gen", 14, 30),  # of the next step, when this one has ended
        (rewards, "reward", 2, 9),
        (trainer, "reward", 9, 10),  # by a model
        (trainer, "update_actor", 13, 18),
        (clock.spans, "update_actor", 11, 18),  # the driver waited for the critic before
        (clock.spans, "update_weights", 18, 20),
        (clock.spans, "step", 0, 20),
    ):
        spans.add(phase, began + start, began + end)
    group = SimpleNamespace(take_spans=lambda: Pending.known(trainer.take()))
    parts: Any = ([group], SimpleNamespace(spans=engines), rewards)
    rewards.take_spans = rewards.take  # type: ignore[attr-defined]
    before = time.perf_counter()
    found = timeline(7, clock, *parts)
    exact = partial(pytest.approx, abs=0.01 + time.perf_counter() - before)
    assert found.step == 7 and found.seconds >= 20
    assert found.phases["gen"][0] == exact((0, 8)) and found.phases["gen"][-1][1] == exact(found.seconds)
    assert found.phases["update_actor"] == [exact((13, 18))] and found.phases["update_weights"] == [exact((18, 20))]
    assert (found.phases["reward"][0][0], found.phases["reward"][-1][1]) == exact((2, 10))
    assert list(found.phases) == ["gen", "reward", "update_actor", "update_weights"]
    assert list(timeline(8, clock, *parts).phases) == []  # nothing is counted twice


@pytest.mark.parametrize(
    ("late_s", "shift"),
    [(0.0, 0.0), (0.2, 0.2), (0.5, 0.5), (3.0, 0.5)],
)
def test_spans_of_a_worker_that_answers_late_stay_in_the_step(late_s: float, shift: float) -> None:
    """The step began 2 s ago; the first span would have begun 2.5 s ago."""
    found = not_before(-2.0, {"values": [(-2.5, -2.25)], "update_actor": [(-2.0, -1.0), (-0.75, -0.5)]}, late_s)
    assert found == {
        "values": [(-2.5 + shift, -2.25 + shift)],
        "update_actor": [(-2.0 + shift, -1.0 + shift), (-0.75 + shift, -0.5 + shift)],
    }


def test_spans_within_the_step_stay_as_they_are() -> None:
    inside = {"values": [(-2.0, -1.0)]}
    assert not_before(-2.0, inside, 5.0) == inside and not_before(-2.0, {}, 5.0) == {}


def test_lent_engines_are_counted_if_any_has_come() -> None:
    def measured(own: int, before: list[int]) -> dict[str, float]:
        queue: Any = SimpleNamespace(repeated=0, lost_tokens=0, own=own, tokens=[40, 30, 20, 10])
        found = rollout_metrics(queue, 3.0, before, {"timing_s/gen": 5.0}, None)
        return {name.removeprefix("rollout/lent_"): value for name, value in found.items() if "lent" in name}

    assert measured(4, [0, 0, 0, 0]) == {}
    assert measured(1, [10, 30, 20]) == {"engines": 1.0, "share": 0.25}  # the last one has come in this step
    assert measured(1, [40, 30, 20, 10]) == {"engines": 0.0, "share": 0.0}
    assert measured(0, []) == {"engines": 4.0, "share": 1.0}
