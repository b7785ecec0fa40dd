"""Conversations as one response: what was sampled, what was observed, and with which weights."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.rl.converse.transcripts import Transcript
from hpc_rl.rl.loop.experience import new_experience
from hpc_rl.rl.rollout.engine import Completion, Span

PROMPT = np.array([7, 8], np.int32)
OUTCOME = EpisodeResult(1.0)
MESSAGES = [{"role": "assistant", "content": "4"}]
turns_of_spans = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3), min_size=1, max_size=4
)


def turn(ids: list[int], *spans: tuple[int, int]) -> Completion:
    found = np.array(ids, np.int32)
    return Completion(found, -found.astype(np.float32), True, tuple(Span(*span) for span in spans or [(0, len(ids))]))


def test_two_turns_by_hand() -> None:
    transcript = Transcript(PROMPT, most=9)
    transcript.add_turn(turn([1, 2, 3], (4, 1), (5, 2)))
    assert transcript.left == 6 and transcript.ids().tolist() == [7, 8, 1, 2, 3]
    assert transcript.add_observation([20, 21])
    transcript.add_turn(turn([4], (5, 1)))
    assert (transcript.turns, transcript.left) == (2, 3) and transcript.ids().tolist() == [7, 8, 1, 2, 3, 20, 21, 4]
    found = transcript.joined(True, OUTCOME, MESSAGES, calls=3, bad_calls=1)
    assert found.token_ids.tolist() == [1, 2, 3, 20, 21, 4] and found.logprobs.tolist() == [-1, -2, -3, 0, 0, -4]
    assert found.mask is not None and found.mask.tolist() == [True, True, True, False, False, True]
    assert found.spans == (Span(4, 1), Span(5, 5)) and found.prompt is PROMPT and found.sampled == 4
    assert (found.turns, found.calls, found.bad_calls, found.outcome) == (2, 3, 1, OUTCOME)
    assert found.last_turn.tolist() == [4] and found.messages == MESSAGES


def test_one_turn_is_as_without_an_environment() -> None:
    transcript = Transcript(PROMPT, most=9)
    transcript.add_turn(turn([1, 2]))
    found = transcript.joined(False, OUTCOME, [], 0, 0)
    assert found.mask is None and not found.finished and found.last_turn.tolist() == [1, 2]


def test_an_observation_leaves_room_for_a_token() -> None:
    for length, fits in ((3, True), (4, False), (5, False)):
        transcript = Transcript(PROMPT, most=6)
        transcript.add_turn(turn([1, 2]))
        assert transcript.add_observation([9] * length) == fits
        assert transcript.left == (4 - length if fits else 4)


@given(turns_of_spans, st.integers(1, 5))
def test_every_token_has_a_span_and_sampled_ones_stay_as_they_are(
    turns: list[list[tuple[int, int]]], observed: int
) -> None:
    transcript, sampled = Transcript(PROMPT, most=10**6), []
    for number, spans in enumerate(turns):
        if number:
            assert transcript.add_observation([99] * observed)
        ids = list(range(1, 1 + sum(tokens for _, tokens in spans)))
        sampled += ids
        transcript.add_turn(turn(ids, *spans))
    found = transcript.joined(True, OUTCOME, [], 0, 0)
    assert sum(span.tokens for span in found.spans) == len(found.token_ids) == 10**6 - transcript.left
    mask = np.ones(len(found.token_ids), np.bool_) if found.mask is None else found.mask
    assert found.token_ids[mask].tolist() == sampled and set(found.token_ids[~mask].tolist()) <= {99}
    versions = np.repeat([span.version for span in found.spans], [span.tokens for span in found.spans])
    assert versions[mask].tolist() == [v for spans in turns for v, tokens in spans for _ in range(tokens)]
    assert all(a.version != b.version for a, b in zip(found.spans, found.spans[1:], strict=False))


def test_a_conversation_may_have_a_prompt_of_its_own() -> None:
    transcript = Transcript(PROMPT, most=9)
    transcript.add_turn(turn([1, 2]))
    asked = np.array([5], np.int32)
    experience = new_experience([asked, asked], [0, 0], [transcript.joined(True, OUTCOME, [], 0, 0), turn([3])])
    assert [row.tolist() for row in experience["prompt_ids"].unbind()] == [[7, 8], [5]]
