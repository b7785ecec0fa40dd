"""Drawing a step's batch, with engines and a reward that are functions of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop.batches import SynchronousBatches, training_samples
from hpc_rl.rl.loop.computed import ComputedColumns
from hpc_rl.rl.loop.draws import Batch, joined_scores, part_of
from hpc_rl.rl.loop.scoring import ModelScoring, NoBatchError
from hpc_rl.rl.loop.trainer import greedy_scores
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from tests.rl.ppo_config import ppo_config

PROMPTS = [Prompt(np.array([i], np.int32), str(i), {}, f"prompt {i}") for i in range(10)]
START = Position()
Score = Callable[[Prompt, Completion], float]


class Queue:
    """A response is its seed's last digit; the greedy one is 5. Each turn completes one of the responses."""

    def __init__(self, order: int) -> None:
        self.asked: list[tuple[int, list[int], list[Sampling], int]] = []
        """Prompt, seeds, samplings and wave of each group."""
        self.is_paused = True
        self._open: list[tuple[QueuedResponses, Request]] = []
        self._random = random.Random(order)

    def ask(self, prompt: Prompt, draws: Sequence[tuple[int, Sampling]], wave: int = 0) -> QueuedResponses:
        self.asked.append(
            (int(prompt.token_ids[0]), [seed for seed, _ in draws], [sampling for _, sampling in draws], wave)
        )
        asked = QueuedResponses([Request(number, prompt.token_ids, *draw) for number, draw in enumerate(draws)])
        self._open += [(asked, request) for request in asked.requests]
        return asked

    def turn(self, timeout_s: float) -> None:
        self.is_paused = False
        asked, request = self._open.pop(self._random.randrange(len(self._open)))
        token = request.seed % 10 if request.sampling.temperature else 5
        asked.found[request.number] = Completion(np.array([token], np.int32), np.zeros(1, np.float32), True)

    def wait(self, asked: Sequence[QueuedResponses], stops: Callable[[], bool] = lambda: False) -> bool:
        while not all(one.is_complete for one in asked):
            if stops():
                return False
            self.turn(1.0)
        return True

    def pause(self) -> None:
        self.is_paused = True


class Scoring:
    def __init__(self, score: Score, at_once: bool = True) -> None:
        self._score = score
        self.at_once = at_once
        self.calls: list[list[str]] = []

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        self.calls.append([prompt.answer for prompt in prompts])
        values = [self._score(*pair) for pair in zip(prompts, completions, strict=True)]
        components = [{"length": float(len(completion.token_ids))} for completion in completions]
        return Pending.known(Scores(np.array(values, np.float32), [], components))


def source(
    config: PpoConfig,
    score: Score | Scoring,
    start: Position = START,
    order: int = 0,
    computed: ComputedColumns | None = None,
    mixture: Mixture | None = None,
) -> tuple[SynchronousBatches, Queue]:
    queue, scoring = Queue(order), score if isinstance(score, Scoring) else Scoring(score)
    computed = computed or ComputedColumns({}, 0, 1)
    return SynchronousBatches(config, PROMPTS, queue, scoring, start, computed, mixture), queue


def drawn(source: SynchronousBatches, step: int) -> Batch:
    batch = source.draw(step, lambda: False)
    assert batch is not None
    return batch


def token(completion: Completion) -> int:
    return int(completion.token_ids[0])


def by_token(_: Prompt, completion: Completion) -> float:
    return float(token(completion))


def test_each_prompt_is_answered_n_times_side_by_side() -> None:
    drawing, queue = source(ppo_config("data.shuffle=false"), by_token)
    batch = drawn(drawing, 0)
    assert [prompt.answer for prompt in batch.prompts] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert batch.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [asked[0] for asked in queue.asked] == [0, 1, 2, 3]
    seeds = [seed for asked in queue.asked for seed in asked[1]]
    assert seeds == np.random.default_rng([1, 0, 0]).integers(2**62, size=8).tolist()
    assert all(asked[2] == [Sampling(8, 1.0, 1.0, 0)] * 2 for asked in queue.asked)
    assert len(batch.experience()) == 8 and queue.is_paused


def test_prompts_of_files_with_weights() -> None:
    """The first two prompts are one file, and the other eight another. An epoch has two batches of four."""
    mixture, answers = Mixture((2, 8), (5, 3)), list[str]()
    drawing, _ = source(ppo_config(), by_token, mixture=mixture)
    for step in range(4):
        answers += [prompt.answer for prompt in drawn(drawing, step).prompts[::2]]
    seed = ppo_config().trainer.seed
    assert answers == [str(index) for epoch in (0, 1) for index in mixture.order(seed, epoch, True)]
    of_second = [answer for answer in answers if int(answer) > 1]
    assert len(set(of_second)) == len(of_second) == 6, "none is repeated before all others"
    resumed, _ = source(ppo_config(), by_token, Position(0, 4), mixture=mixture)
    assert [prompt.answer for prompt in drawn(resumed, 1).prompts[::2]] == answers[4:8]


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
    drawing, queue = source(ppo_config(), by_token)
    for step in range(4):
        drawn(drawing, step)
    epochs = [{asked[0] for asked in queue.asked[i : i + 8]} for i in (0, 8)]
    assert [len(epoch) for epoch in epochs] == [8, 8] and epochs[0] != epochs[1]
    assert [asked[3] for asked in queue.asked] == [step for step in range(4) for _ in range(4)]


def test_each_group_is_scored_alone_or_all_together() -> None:
    for at_once, calls in ((True, 4), (False, 1)):
        scoring = Scoring(by_token, at_once)
        drawing, _ = source(ppo_config("data.shuffle=false"), scoring)
        batch = drawn(drawing, 0)
        assert len(scoring.calls) == calls and sorted(answer for call in scoring.calls for answer in call) == list(
            "00112233"
        )
        assert batch.scored.wait().values.tolist() == [token(completion) for completion in batch.completions]


def odd(prompt: Prompt, completion: Completion) -> float:
    """Responses to even prompts all score alike."""
    return by_token(prompt, completion) if int(prompt.answer) % 2 else 1.0


FILTER = ("algorithm.filter_groups=true", "rollout.n=4")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("order", range(5))
def test_dynamic_sampling_replaces_each_prompt_whose_responses_score_alike(order: int, at_once: bool) -> None:
    """The batch has the first others, in the order of the data, whichever response is complete first."""
    drawing, queue = source(ppo_config(*FILTER), Scoring(odd, at_once), order=order)
    batch = drawn(drawing, 0)
    prompts = [asked[0] for asked in queue.asked]
    useful = [number for number in prompts if number % 2]
    assert len(useful) == 4 and prompts[-1] == useful[-1], "not one prompt too many"
    assert [prompt.answer for prompt in batch.prompts] == [str(number) for number in useful for _ in range(4)]
    assert batch.groups == [group for group in range(4) for _ in range(4)]
    scores = batch.scored.wait()
    assert scores.values.tolist() == [token(completion) for completion in batch.completions]
    assert list(scores.components) == [{"length": 1.0}] * 16
    seeds = [asked[1] for asked in queue.asked]
    again, _ = source(ppo_config(*FILTER), odd, order=99)
    assert [token(c) for c in drawn(again, 0).completions] == [token(c) for c in batch.completions]
    assert again.position == drawing.position and len(set(map(tuple, seeds))) == len(seeds)


@pytest.mark.parametrize("options", [("algorithm.advantage=grpo",), ("algorithm.advantage=remax",), FILTER])
@pytest.mark.parametrize("order", [1, 2])
def test_columns_are_computed_for_the_first_responses_of_the_batch(options: tuple[str, ...], order: int) -> None:
    seen: list[tuple[list[Prompt], list[int], list[Completion]]] = []

    class Computed(ComputedColumns):
        awaits = 0

        def begin(self, *responses: Any) -> None:
            seen.append(responses)  # type: ignore[arg-type]

    drawing, _ = source(ppo_config(*options), odd, order=order, computed=Computed({}, 0, 1))
    batch = drawn(drawing, 0)
    for prompts, groups, completions in seen:
        assert all(one is other for one, other in zip(prompts, batch.prompts, strict=False))
        assert all(one is other for one, other in zip(completions, batch.completions, strict=False))
        assert groups == batch.groups[: len(groups)] and len(prompts) == len(groups) == len(completions)
    counts = [len(completions) for *_, completions in seen]
    assert counts == sorted(counts) and counts[-1] == len(batch.prompts)
    assert 0 < min(count for count in counts if count) < counts[-1], "seen before the others were complete"


def test_the_next_step_continues_after_the_last_prompt_that_was_drawn() -> None:
    straight, queue = source(ppo_config(*FILTER), odd)
    drawn(straight, 0)
    first = len(queue.asked)
    resumed, again = source(ppo_config(*FILTER), odd, straight.position)
    expected = [p.answer for p in drawn(straight, 1).prompts]
    assert [p.answer for p in drawn(resumed, 1).prompts] == expected
    assert [asked[:2] for asked in again.asked] == [asked[:2] for asked in queue.asked[first:]]


def test_a_run_whose_engines_have_all_left_stops_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing, queue = source(ppo_config("rollout.engines=lent"), by_token)
    monkeypatch.setattr(queue, "turn", lambda timeout_s: None)  # nothing is generated
    asked = count()
    assert drawing.draw(0, lambda: next(asked) == 3) is None and queue.is_paused


def test_dynamic_sampling_stops_before_it_draws_further_prompts() -> None:
    drawing, queue = source(ppo_config(*FILTER, "algorithm.max_gen_batches=5"), lambda *_: 1)
    answers = iter([False, True])
    assert drawing.draw(0, lambda: next(answers)) is None
    assert len(queue.asked) == 5 and queue.is_paused


@pytest.mark.parametrize("options", [(), ("agent.endpoint=loopback",)])
def test_a_stop_does_not_wait_for_agents(options: tuple[str, ...]) -> None:
    drawing, queue = source(ppo_config(*options), by_token)
    answers = iter([False, True])
    batch = drawing.draw(0, lambda: next(answers))
    assert (batch is None, len([*answers])) == ((True, 0) if options else (False, 2))
    assert queue.is_paused


def test_dynamic_sampling_gives_up() -> None:
    drawing, queue = source(ppo_config(*FILTER, "algorithm.max_gen_batches=3"), lambda *_: 1)
    with pytest.raises(NoBatchError) as caught:
        drawn(drawing, 0)
    assert str(caught.value) == (
        "algorithm.filter_groups: of 12 prompts (3 batches of 4, algorithm.max_gen_batches), only 0 had responses with "
        "different scores. The task is too easy or too hard for this model: raise algorithm.max_gen_batches or "
        "rollout.n, or set algorithm.filter_groups=false"
    )
    assert len(queue.asked) == 12


def test_dynamic_sampling_ends_if_nothing_can_be_scored() -> None:
    class Broken(Scoring):
        def start(self, prompts: Any, completions: Any, texts: Any = None) -> Pending[Scores]:
            errors = [(index, f"broken {index}") for index in range(len(prompts))]
            return Pending.known(Scores(np.full(len(prompts), np.nan, np.float32), errors))

    drawing, queue = source(ppo_config(*FILTER), Broken(by_token))
    with pytest.raises(RunError, match=r"step 1: none of 16 responses could be scored; the first error: broken 0"):
        drawn(drawing, 0)
    assert len(queue.asked) <= 7


def test_errors_of_rejected_groups_count() -> None:
    class Half(Scoring):
        def start(self, prompts: Any, completions: Any, texts: Any = None) -> Pending[Scores]:
            scores = super().start(prompts, completions).wait()
            failed = [(0, "late")] if int(prompts[0].answer) % 2 == 0 else []
            return Pending.known(Scores(scores.values, failed, scores.components))

    drawing, queue = source(ppo_config(*FILTER), Half(odd))
    errors = drawn(drawing, 0).scored.wait().errors
    assert len(errors) == sum(asked[0] % 2 == 0 for asked in queue.asked) > 0


def test_parts_of_scores_and_the_whole() -> None:
    scores = Scores(np.arange(5, dtype=np.float32), [(1, "a"), (4, "b")], [{"x": float(i)} for i in range(5)])
    parts = [part_of(scores, 0, 2), part_of(scores, 2, 5)]
    assert parts[1].values.tolist() == [2, 3, 4] and parts[1].errors == [(2, "b")] and parts[0].errors == [(1, "a")]
    assert list(parts[1].components) == [{"x": 2.0}, {"x": 3.0}, {"x": 4.0}]
    whole = joined_scores(parts, [Scores(np.zeros(1, np.float32), [(0, "c")])])
    assert whole.values.tolist() == [0, 1, 2, 3, 4] and whole.errors == [(1, "a"), (4, "b"), (0, "c")]
    assert list(whole.components) == list(scores.components)
    assert joined_scores([part_of(Scores(np.zeros(2, np.float32), []), 0, 1)]).components == ()


def test_remax_compares_with_a_greedy_response_to_the_same_prompt() -> None:
    def score(prompt: Prompt, completion: Completion) -> float:
        return 100 * int(prompt.answer) + token(completion)

    overlong = ("algorithm.overlong_buffer=8", "algorithm.overlong_penalty=16")  # 2 for each token
    config = ppo_config("algorithm.advantage=remax", "data.shuffle=false", *overlong)
    drawing, queue = source(config, score)
    batch = drawn(drawing, 0)
    assert [sampling.temperature for sampling in queue.asked[1][2]] == [1, 1, 0] and len(queue.asked) == 4
    assert batch.groups == [0, 0, 1, 1, 2, 2, 3, 3] and len(batch.scored.wait().values) == 8
    found = greedy_scores(batch, config)
    assert found is not None and found.tolist() == [3, 3, 103, 103, 203, 203, 303, 303]


def test_other_estimators_have_no_greedy_scores() -> None:
    drawing, queue = source(ppo_config(), by_token)
    assert greedy_scores(drawn(drawing, 0), ppo_config()) is None
    assert all(len(asked[1]) == 2 for asked in queue.asked)


class Words:
    """A tokenizer whose text is the token's number."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def batch_decode(self, token_ids: Sequence[NDArray[np.int32]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [str(int(ids[0])) for ids in token_ids]


def test_samples_of_a_step_are_the_best_and_the_worst_response() -> None:
    rising = count()
    scoring = Scoring(lambda prompt, completion: float(next(rising)), at_once=False)
    drawing, _ = source(ppo_config("data.shuffle=false"), scoring)
    batch = drawn(drawing, 0)
    rows = training_samples(batch, Words())  # type: ignore[arg-type]
    assert [row["score"] for row in rows] == [1.0, 0.0, 3.0, 2.0]
    assert [row["response"] for row in rows] == [str(token(batch.completions[index])) for index in (1, 0, 3, 2)]
    assert [row["answer"] for row in rows] == ["0", "0", "1", "1"] and rows[0]["prompt"] == "prompt 0"


def test_scores_of_a_reward_model_are_limited_too() -> None:
    config = OptionalRewardConfig(model="unused", clip=(-1, 0.5), on_error=-3.0)
    scores = ModelScoring(None, config)._checked(torch.tensor([-2.0, torch.inf, 7.0]))  # type: ignore[arg-type]
    assert scores.values.tolist() == [-1.0, -3.0, 0.5] and scores.errors == [(1, "not finite")]
