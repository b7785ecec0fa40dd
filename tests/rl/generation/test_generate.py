"""The loop of generation: what is on disk after a stop, after an error, and after a reward that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.rewards.scorer import Scores, open_scorer
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.generation import generate as loop
from hpc_rl.rl.generation.generate import Generation, generate
from hpc_rl.rl.generation.measures import combined, measure
from hpc_rl.rl.generation.plan import blocks_of, make_plan
from hpc_rl.rl.generation.responses import Parts, read_responses
from hpc_rl.rl.loop.scoring import FunctionScoring
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.run_dir import RunDir
from tests.rl.generation.test_plan import completions, config, sources

Values = Callable[[int], float]
"""From the number of a call to the score of each of its responses; NaN if the reward fails."""


class Engines:
    """Respond to prompts, in the order of their requests."""

    def __init__(self) -> None:
        self.asked: list[SimpleNamespace] = []
        self.completes: list[int] = []
        """Blocks of two prompts that each call of `turn` completes; all if there is no such call any more. 0: an engine
        is dead."""

    def ask(self, prompt: Prompt, draws: Sequence[Any], wave: int) -> SimpleNamespace:
        found = completions(len(draws))
        self.asked.append(SimpleNamespace(is_complete=False, completions=lambda: found))
        return self.asked[-1]

    def turn(self, timeout_s: float) -> None:
        count = 2 * self.completes.pop(0) if self.completes else len(self.asked)
        if not count:
            raise RunError("an engine is dead")
        for one in self.asked[:count]:
            one.is_complete = True
        del self.asked[:count]


class Scoring:
    """Scores each block in its own call. From call `hangs_at` on, it hangs until it is closed."""

    def __init__(self, values: Values = lambda _: 1.0, hangs_at: int = 1000) -> None:
        self._values, self._hangs_at = values, hangs_at
        self._calls = 0
        self.hangs, self.closed = threading.Event(), threading.Event()

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        def compute(_: float) -> Scores:
            if number >= self._hangs_at:
                self.hangs.set()
                if self.closed.wait(600):
                    raise RunError("closed")
            value = self._values(number)
            errors = [(index, "broken") for index in range(len(prompts)) if np.isnan(value)]
            return Scores(np.full(len(prompts), value, np.float32), errors)

        number, self._calls = self._calls, self._calls + 1
        return Pending(compute)

    def close(self) -> None:
        self.closed.set()


class Tokenizer:
    """Counts the responses that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0
        self.added_tokens_decoder: dict[int, Any] = {}

    def batch_decode(self, ids: Sequence[Any], skip_special_tokens: bool) -> list[str]:
        self.decoded += len(ids)
        return [" ".join(map(str, each)) for each in ids]


class Tracker:
    """Keeps the metrics of the last step."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def log(self, step: int, metrics: dict[str, float], total_steps: int) -> None:
        self.last = metrics


class Stopping:
    """Stops as soon as `when` is true."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self._when = when

    def due(self, work_s: float) -> bool:
        return self._when()

    def note_step(self, seconds: object) -> None:
        pass

    def is_in_vain(self) -> bool:
        return False


def attempt(
    folder: Path, scoring: Scoring | FunctionScoring, stops: Callable[[], bool] = lambda: False, blocks: int = 4
) -> Generation:
    """Return an attempt of a run with blocks of two responses."""
    settings, given = config("rollout.max_num_seqs=2", "reward.function=exact"), sources(2 * blocks)
    plan = make_plan(settings, given, "hf")
    parts = Parts(RunDir(folder), plan)
    finished = parts.finished()
    left = [block for block in blocks_of(plan, given) if block.number not in finished]
    others: Any = {
        "tokenizer": Tokenizer(),
        "queue": None,
        "respondent": Engines(),
        "engines": 1000,
        "sampling": None,
        "scoring": scoring,
        "tracker": Tracker(),
        "stopping": Stopping(stops),
    }
    counts = {"done": len(finished), "measures": combined(parts.measured())}
    return Generation(config=settings, plan=plan, blocks=left, parts=parts, **others, **counts)


def test_a_stop_does_not_wait_for_the_scores_of_a_block(tmp_path: Path) -> None:
    scoring = Scoring(hangs_at=1)
    state = attempt(tmp_path, scoring, stops=scoring.hangs.is_set)
    assert generate(state) == EXIT_STOPPED
    assert scoring.closed.is_set() and state.parts.finished() == {0}
    assert generate(attempt(tmp_path, Scoring())) == 0


def test_an_error_of_an_engine_does_not_wait_for_the_scores_of_a_block(tmp_path: Path) -> None:
    state = attempt(tmp_path, Scoring(hangs_at=1))
    state.respondent.completes = [2, 0]  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="an engine is dead"):
        generate(state)
    assert not state.parts.finished() - {0}


def failing(*calls: int) -> Values:
    return lambda number: np.nan if number in calls else 1.0


@pytest.fixture
def few_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MOST_FAILED", 4)


@pytest.mark.usefixtures("few_failures")
def test_no_block_without_scores_is_finished_if_the_reward_always_fails(tmp_path: Path) -> None:
    state = attempt(tmp_path, Scoring(failing(*range(100))), blocks=9)
    with pytest.raises(RunError, match="none of 4 responses could be scored; the first error: broken"):
        generate(state)
    assert state.parts.finished() == set(), "also those that wait to be recorded"
    assert generate(attempt(tmp_path, Scoring(), blocks=9)) == 0


def test_a_stop_keeps_blocks_without_scores_and_the_next_attempt_counts_them(tmp_path: Path) -> None:
    """A run that is stopped again and again before enough responses have failed would have no end otherwise."""
    scoring = Scoring(failing(0, 1), hangs_at=2)
    state = attempt(tmp_path, scoring, stops=scoring.hangs.is_set)
    assert generate(state) == EXIT_STOPPED
    assert state.parts.finished() == {0, 1}
    state = attempt(tmp_path, Scoring(failing(*range(4))))
    with pytest.raises(RunError, match="none of 8 responses could be scored"):
        generate(state)
    assert state.parts.finished() == set()


@pytest.mark.usefixtures("few_failures")
def test_a_restart_in_data_for_which_the_reward_fails_goes_on(tmp_path: Path) -> None:
    """As the run would have done without the restart."""
    scoring = Scoring(hangs_at=1)
    assert generate(attempt(tmp_path, scoring, stops=scoring.hangs.is_set)) == EXIT_STOPPED
    assert generate(attempt(tmp_path, Scoring(failing(*range(4))))) == 0


def test_the_last_block_may_have_no_scores_if_an_earlier_attempt_had_some(tmp_path: Path) -> None:
    scoring = Scoring(hangs_at=3)
    assert generate(attempt(tmp_path, scoring, stops=scoring.hangs.is_set)) == EXIT_STOPPED
    state = attempt(tmp_path, Scoring(failing(0)))
    assert len(state.blocks) == 1 and generate(state) == 0
    rows = list(read_responses(RunDir(tmp_path).responses))
    assert [row["score"] for row in rows] == [1.0] * 6 + [None] * 2


def test_a_run_whose_reward_fails_for_all_its_few_responses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="none of 8 responses could be scored"):
        generate(attempt(tmp_path, Scoring(failing(*range(4)))))


def test_metrics_are_those_of_all_responses_of_all_attempts(tmp_path: Path) -> None:
    """Not those of the last block, which had 0.25 and no failure."""
    scoring = Scoring(lambda number: [1.0, 0.5, np.nan][number], hangs_at=3)
    assert generate(attempt(tmp_path, scoring, stops=scoring.hangs.is_set)) == EXIT_STOPPED
    state = attempt(tmp_path, Scoring(lambda _: 0.25))
    state.respondent.completes = [1] * len(state.blocks)  # type: ignore[attr-defined]
    assert len(state.blocks) == 1 and generate(state) == 0
    last = state.tracker.last  # type: ignore[attr-defined]
    rows = list(read_responses(RunDir(tmp_path).responses))
    scores = [row["score"] for row in rows if row["score"] is not None]
    assert last["generate/score"] == pytest.approx(sum(scores) / 6) == pytest.approx((1.0 + 0.5 + 0.25) / 3)
    assert last["generate/reward_errors"] == 2 and last["generate/responses"] == 8
    assert last["response_length/mean"] == pytest.approx(sum(row["tokens"] for row in rows) / 8)
    assert not list(state.parts._folder.glob("0*"))


def test_a_block_of_which_only_the_measures_are_written_is_not_finished(tmp_path: Path) -> None:
    state = attempt(tmp_path, Scoring())
    state.parts.write(0, [], {"generate/score": (1.0, 2)})
    state.parts.write(1, [], {"generate/score": (1.0, 2)})
    state.parts._path(0).unlink()
    state.parts._measures(1).unlink()
    assert state.parts.finished() == set() and state.parts.measured() == []


def test_measures_of_blocks_are_combined_by_their_kind() -> None:
    first = {"reward/short": (1.0, 3), "environment/turns/max": (4.0, 9), "environment/errors": (2.0, 9)}
    second = {"reward/short": (0.0, 1), "environment/turns/max": (3.0, 1), "environment/errors": (1.0, 1)}
    assert combined([first, {}, second]) == {
        "reward/short": (0.75, 4),
        "environment/turns/max": (4.0, 10),
        "environment/errors": (3.0, 10),
    }
    assert combined([{"response_length/clip_ratio": (0.0, 0)}] * 2) == {"response_length/clip_ratio": (0.0, 0)}


def test_a_part_of_the_reward_counts_the_responses_that_have_it() -> None:
    scores = Scores(np.array([1.0, np.nan, 0.0], np.float32), [(1, "broken")], [{"short": 1.0}, {}, {"short": 0.0}])
    found = measure(completions(3), scores)
    assert (found["reward/short"], found["generate/score"]) == ((0.5, 2), (0.5, 2))
    assert found["generate/reward_errors"] == (1.0, 3) and found["response_length/mean"][1] == 3


def test_a_response_is_decoded_once(tmp_path: Path) -> None:
    tokenizer: Any = Tokenizer()
    state = attempt(tmp_path, FunctionScoring(open_scorer(config("reward.function=exact").reward), tokenizer))
    state.tokenizer = tokenizer
    assert generate(state) == 0 and tokenizer.decoded == 8
