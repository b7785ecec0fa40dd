"""Drawing a step's batch, with an engine and a reward that are functions of the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hpc_rl.config.ppo import PpoConfig
from hpc_rl.config.reward import RewardConfig
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.batches import Batch, BatchSource, training_samples
from hpc_rl.rl.calls import Pending
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.scoring import ModelScoring
from hpc_rl.rl.trainer import greedy_scores
from tests.rl.ppo_config import ppo_config

PROMPTS = [Prompt(np.array([i], np.int32), str(i), {}, f"prompt {i}") for i in range(10)]
START = Position()
Score = Callable[[Prompt, Completion], float]


class Engine:
    """A response is its seed's last digit; the greedy one is 5."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int], Sampling]] = []

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        self.asked.append(([int(prompt[0]) for prompt in prompts], list(seeds), sampling))
        tokens = [seed % 10 if sampling.temperature else 5 for seed in seeds]
        return Pending.known([Completion(np.array([t], np.int32), np.zeros(1, np.float32), True) for t in tokens])


class Scoring:
    def __init__(self, score: Score) -> None:
        self._score = score

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        values = [self._score(*pair) for pair in zip(prompts, completions, strict=True)]
        components = [{"length": float(len(completion.token_ids))} for completion in completions]
        return Pending.known(Scores(np.array(values, np.float32), [], components))


def source(config: PpoConfig, score: Score, start: Position = START) -> tuple[BatchSource, Engine]:
    engine = Engine()
    return BatchSource(config, PROMPTS, engine, Scoring(score), start), engine  # type: ignore[arg-type]


def drawn(source: BatchSource, step: int) -> Batch:
    batch = source.draw(step, lambda: False)
    assert batch is not None
    return batch


def token(completion: Completion) -> int:
    return int(completion.token_ids[0])


def by_token(_: Prompt, completion: Completion) -> float:
    return float(token(completion))


def test_each_prompt_is_answered_n_times_side_by_side() -> None:
    drawing, engine = source(ppo_config("data.shuffle=false"), by_token)
    batch = drawn(drawing, 0)
    assert [prompt.answer for prompt in batch.prompts] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert batch.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    ((prompts, seeds, sampling),) = engine.asked
    assert prompts == [0, 0, 1, 1, 2, 2, 3, 3] and len(set(seeds)) == 8
    assert sampling == Sampling(8, 1.0, 1.0, 0)
    assert len(batch.experience()) == 8


def test_a_step_draws_the_same_after_a_resume() -> None:
    straight, _ = source(ppo_config(), by_token)
    batches = [drawn(straight, step) for step in range(5)]
    resumed, _ = source(ppo_config(), by_token)
    for step in range(3):
        drawn(resumed, step)
    resumed, _ = source(ppo_config(), by_token, resumed.position)
    for step in (3, 4):
        again = drawn(resumed, step)
        assert [p.answer for p in again.prompts] == [p.answer for p in batches[step].prompts]
        assert [token(c) for c in again.completions] == [token(c) for c in batches[step].completions]


def test_what_is_left_of_an_epoch_waits_for_another_order() -> None:
    drawing, engine = source(ppo_config(), by_token)
    for step in range(4):
        drawn(drawing, step)
    epochs = [{prompt for prompts, _, _ in engine.asked[i : i + 2] for prompt in prompts} for i in (0, 2)]
    assert [len(epoch) for epoch in epochs] == [8, 8]


def test_dynamic_sampling_collects_groups_of_differing_score() -> None:
    """Responses to even prompts all score alike."""

    def score(prompt: Prompt, completion: Completion) -> float:
        return by_token(prompt, completion) if int(prompt.answer) % 2 else 1.0

    drawing, engine = source(ppo_config("algorithm.filter_groups=true", "rollout.n=4"), score)
    batch = drawn(drawing, 0)
    assert len(engine.asked) > 1
    assert len(batch.prompts) == len(batch.completions) == 16
    assert all(int(prompt.answer) % 2 for prompt in batch.prompts)
    assert len(set(batch.groups)) == 4 and sorted(batch.groups) == batch.groups
    scores = batch.scored.wait()
    assert scores.values.tolist() == [token(completion) for completion in batch.completions]
    assert list(scores.components) == [{"length": 1.0}] * 16
    assert len({tuple(seeds) for _, seeds, _ in engine.asked}) == len(engine.asked)  # new numbers at each attempt


def test_dynamic_sampling_stops_between_two_batches() -> None:
    drawing, engine = source(ppo_config("algorithm.filter_groups=true", "algorithm.max_gen_batches=5"), lambda *_: 1)
    answers = iter([False, True])
    assert drawing.draw(0, lambda: next(answers)) is None
    assert len(engine.asked) == 2


def test_dynamic_sampling_gives_up() -> None:
    drawing, engine = source(ppo_config("algorithm.filter_groups=true", "algorithm.max_gen_batches=3"), lambda *_: 1)
    with pytest.raises(RunError) as caught:
        drawn(drawing, 0)
    assert str(caught.value) == (
        "algorithm.filter_groups: in 3 batches of 4 prompts (algorithm.max_gen_batches), only 0 prompts had responses "
        "with different scores. The task is too easy or too hard for this model: raise algorithm.max_gen_batches or "
        "rollout.n, or set algorithm.filter_groups=false"
    )
    assert len(engine.asked) == 3


def test_remax_compares_with_a_greedy_response_to_the_same_prompt() -> None:
    def score(prompt: Prompt, completion: Completion) -> float:
        return 100 * int(prompt.answer) + token(completion)

    overlong = ("algorithm.overlong_buffer=8", "algorithm.overlong_penalty=16")  # 2 for each token
    config = ppo_config("algorithm.advantage=remax", "data.shuffle=false", *overlong)
    drawing, engine = source(config, score)
    batch = drawn(drawing, 0)
    (_, _, greedy) = engine.asked[1]
    assert greedy.temperature == 0 and len(engine.asked[1][0]) == 4
    found = greedy_scores(batch, config)
    assert found is not None and found.tolist() == [3, 3, 103, 103, 203, 203, 303, 303]


def test_other_estimators_have_no_greedy_scores() -> None:
    drawing, engine = source(ppo_config(), by_token)
    assert greedy_scores(drawn(drawing, 0), ppo_config()) is None
    assert len(engine.asked) == 1


class Words:
    """A tokenizer whose text is the token's number."""

    def batch_decode(self, token_ids: Sequence[NDArray[np.int32]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [str(int(ids[0])) for ids in token_ids]


def test_samples_of_a_step_are_the_best_and_the_worst_response() -> None:
    rising = count()
    drawing, _ = source(ppo_config("data.shuffle=false"), lambda prompt, completion: float(next(rising)))
    batch = drawn(drawing, 0)
    rows = training_samples(batch, Words())  # type: ignore[arg-type]
    assert [row["score"] for row in rows] == [1.0, 0.0, 3.0, 2.0]
    assert [row["response"] for row in rows] == [str(token(batch.completions[index])) for index in (1, 0, 3, 2)]
    assert [row["answer"] for row in rows] == ["0", "0", "1", "1"] and rows[0]["prompt"] == "prompt 0"


def test_scores_of_a_reward_model_are_limited_too() -> None:
    config = RewardConfig(model="unused", clip=(-1, 0.5), on_error=-3.0)
    scores = ModelScoring(None, config)._checked(torch.tensor([-2.0, torch.inf, 7.0]))  # type: ignore[arg-type]
    assert scores.values.tolist() == [-1.0, -3.0, 0.5] and scores.errors == [(1, "not finite")]
