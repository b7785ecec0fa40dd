"""How validation samples and what it shows, with engines and a reward that are functions of the seed alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpc_rl.rl.loop.validation import Validation, validate
from tests.rl.loop.test_batches import PROMPTS, Queue, Scoring, Words, by_token
from tests.rl.ppo_config import ppo_config

SAMPLED = ("rollout.val.n=3", "rollout.val.temperature=0.6", "rollout.val.top_p=0.9")


def validated(*overrides: str) -> tuple[Validation, Queue]:
    found, queue = begun(lambda: True, *overrides)
    assert found is not None
    return found, queue


def begun(stops: Callable[[], bool], *overrides: str) -> tuple[Validation | None, Queue]:
    queue = Queue(0)
    config = ppo_config("trainer.log_val_generations=2", *overrides)
    return validate(PROMPTS[:4], queue, Scoring(by_token), Words(), config, stops), queue  # type: ignore[arg-type]


def test_a_stop_ends_it_if_all_engines_may_leave() -> None:
    found, queue = begun(lambda: True, "rollout.engines=lent")
    assert found is None and queue.is_paused
    looks = iter([False, False, True])
    assert begun(lambda: next(looks), "rollout.engines=lent")[0] is None
    assert begun(lambda: False, "rollout.engines=lent")[0] == validated()[0]


def test_one_greedy_response_to_each_prompt() -> None:
    found, queue = validated()
    assert [asked[0] for asked in queue.asked] == [0, 1, 2, 3] and queue.is_paused
    assert [[sampling.temperature for sampling in asked[2]] for asked in queue.asked] == [[0]] * 4
    assert found.metrics["val/score"] == 5.0
    assert [sample["prompt"] for sample in found.samples] == ["prompt 0", "prompt 1"]


def test_several_sampled_responses_to_each_prompt() -> None:
    found, queue = validated(*SAMPLED)
    seeds, sampling = [seed for asked in queue.asked for seed in asked[1]], queue.asked[0][2][0]
    assert [(asked[0], len(asked[1])) for asked in queue.asked] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert len(set(seeds)) == 12
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.6, 0.9, 8)
    digits = [seed % 10 for seed in seeds]
    assert found.metrics["val/score"] == pytest.approx(sum(digits) / 12)
    assert [sample["prompt"] for sample in found.samples] == ["prompt 0", "prompt 1"]
    assert [sample["score"] for sample in found.samples] == [digits[0], digits[3]]
    assert [sample["response"] for sample in found.samples] == [str(digits[0]), str(digits[3])]
    assert validated(*SAMPLED)[0] == found
