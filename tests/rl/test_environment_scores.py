"""The rewards of environments, and their sum with those of another source."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.loop.scoring import NO_REWARD, EnvironmentScoring, last_turns, response_texts
from hpc_rl.rl.rollout.engine import Completion


def conversed(outcome: EpisodeResult, *ids: int) -> Conversed:
    found = np.array(ids or [1], np.int32)
    return Conversed(found, found.astype(np.float32), True, outcome=outcome, messages=[], turns=1, mask=found > 0)


OUTCOMES = [
    EpisodeResult(1.0, {"calls": 2.0}),
    EpisodeResult(None, error="late"),
    EpisodeResult(-3.0),
    EpisodeResult(None),
]


class Other:
    at_once = False

    def __init__(self) -> None:
        self.texts: Sequence[str] | None = None

    def start(self, prompts: Any, completions: Sequence[Completion], texts: Sequence[str] | None = None) -> Any:
        self.texts = texts
        values = np.array([0.5, 0.5, np.nan, 0.5], np.float32)
        return Pending.known(Scores(values, [(2, "broken")], [{"own": float(index)} for index in range(4)]))


class Words:
    """A tokenizer whose text is the tokens' numbers, with a mark if special tokens stay."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {9: "<|im_end|>"}
    """Not a special token."""

    def batch_decode(self, rows: Sequence[Any], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) + "!" * (not skip_special_tokens) for row in rows]


def scores(config: OptionalRewardConfig, other: Any = None, missing: float | None = None) -> Scores:
    scoring = EnvironmentScoring(SimpleNamespace(), other, config, Words(), missing)  # type: ignore[arg-type]
    assert scoring.at_once == (other is None)
    return scoring.start([None] * 4, [conversed(each) for each in OUTCOMES]).wait()  # type: ignore[list-item]


def test_the_reward_of_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    found = scores(OptionalRewardConfig())
    assert found.values.tolist() == pytest.approx([1, np.nan, -3, np.nan], nan_ok=True)
    assert found.errors == [(1, "late"), (3, NO_REWARD)]
    assert found.components[0] == {"calls": 2.0} and not found.components[2]
    assert "warning: 2 of 4 conversations have no reward: late" in capsys.readouterr().err
    limited = scores(OptionalRewardConfig(clip=(-1, 0.5), on_error=-9))
    assert limited.values.tolist() == [0.5, -9, -1, -9]
    for missing in (0.0, np.nan):
        found = scores(OptionalRewardConfig(), missing=missing)
        assert found.values.tolist() == pytest.approx([1, np.nan, -3, missing], nan_ok=True)
        assert found.errors == [(1, "late")]


def test_the_sum_of_two_rewards() -> None:
    found = scores(OptionalRewardConfig(clip=(0, 1.2)), Other())
    assert found.values.tolist() == pytest.approx([1.2, np.nan, np.nan, 0.5], nan_ok=True)
    assert found.errors == [(1, "late"), (2, "broken")]
    assert found.components[0] == {"environment": 1.0, "own": 0.0, "calls": 2.0}
    assert found.components[1] == {"own": 1.0}


def test_a_function_gets_the_last_turn() -> None:
    other = Other()
    scoring = EnvironmentScoring(None, other, OptionalRewardConfig(), Words(), None)  # type: ignore[arg-type]
    scoring.start([None] * 4, [conversed(OUTCOMES[0], 1, 2, 0, 0, 3, 4)] * 4).wait()  # type: ignore[list-item]
    assert other.texts == ["3 4"] * 4


def test_samples_show_the_turns() -> None:
    plain = Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), True)
    assert response_texts(Words(), [plain, conversed(OUTCOMES[0], 1, 0, 3)]) == ["1 2", "1 0 3!"]  # type: ignore[arg-type]


def test_the_token_that_ends_a_response_is_not_scored() -> None:
    """Some tokenizers have it as an added token that is not special, which decoding keeps."""

    def plain(finished: bool) -> Completion:
        return Completion(np.array([1, 9], np.int32), np.zeros(2, np.float32), finished)

    for decode in (response_texts, last_turns):
        assert decode(Words(), [plain(True), plain(False)]) == ["1", "1 9"]  # type: ignore[arg-type]
    assert last_turns(Words(), [conversed(OUTCOMES[0], 1, 9, 0, 3, 9)]) == ["3"]  # type: ignore[arg-type]
