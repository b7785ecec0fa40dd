"""How validation samples and what it shows, with an engine and a reward that are functions of the seed alone."""

from __future__ import annotations

import pytest

from hpc_rl.rl.validation import Validation, validate
from tests.rl.ppo_config import ppo_config
from tests.rl.test_batches import PROMPTS, Engine, Scoring, Words, by_token

SAMPLED = ("rollout.val.n=3", "rollout.val.temperature=0.6", "rollout.val.top_p=0.9")


def validated(*overrides: str) -> tuple[Validation, Engine]:
    engine = Engine()
    config = ppo_config("trainer.log_val_generations=2", *overrides)
    return validate(PROMPTS[:4], engine, Scoring(by_token), Words(), config), engine  # type: ignore[arg-type]


def test_one_greedy_response_to_each_prompt() -> None:
    found, engine = validated()
    ((prompts, _, sampling),) = engine.asked
    assert prompts == [0, 1, 2, 3] and sampling.temperature == 0
    assert found.metrics["val/score"] == 5.0
    assert [sample["prompt"] for sample in found.samples] == ["prompt 0", "prompt 1"]


def test_several_sampled_responses_to_each_prompt() -> None:
    found, engine = validated(*SAMPLED)
    ((prompts, seeds, sampling),) = engine.asked
    assert prompts == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3] and len(set(seeds)) == 12
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.6, 0.9, 8)
    digits = [seed % 10 for seed in seeds]
    assert found.metrics["val/score"] == pytest.approx(sum(digits) / 12)
    assert [sample["prompt"] for sample in found.samples] == ["prompt 0", "prompt 1"]
    assert [sample["score"] for sample in found.samples] == [digits[0], digits[3]]
    assert [sample["response"] for sample in found.samples] == [str(digits[0]), str(digits[3])]
    assert validated(*SAMPLED)[0] == found
