"""Requests that enter, continue and end one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.rl.rollout.engine import SEEDS, Completion, Request, Sampling, Span, complete
from hpc_rl.rl.rollout.hf.batch import STEPS_BETWEEN_CHECKS
from hpc_rl.rl.rollout.hf.engine import HfEngine
from hpc_rl.rl.rollout.hf.kv_cache import KVCache
from hpc_rl.rl.rollout.sampling import sample, uniforms
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from tests.helpers import make_tiny_model
from tests.rl.rollout.tiny_engine import counted_tokens, forward_logprobs, prompts, sharp_model, token_lists

EOS = range(0, 300, 12)
PROMPTS = prompts([7, 1, 20, 3])
SAMPLINGS = [Sampling(8), Sampling(3, temperature=0), Sampling(13, 0.7, top_p=0.9), Sampling(8, top_k=4)]


def requests_of(given: Sequence[NDArray[np.int32]], sampling: Sampling, first: int = 0) -> list[Request]:
    """Return requests whose seeds are their numbers."""
    return [Request(number, prompt, number, sampling) for number, prompt in enumerate(given, first)]


def until_empty(engine: HfEngine, slice_s: float = math.inf, version: int = 0) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while engine.running:
        found.update(engine.advance(slice_s, version))
    return found


def in_order(found: dict[int, Completion]) -> list[list[int]]:
    return token_lists([found[number] for number in sorted(found)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return sharp_model(tmp_path_factory.mktemp("model"))


class Alone:
    """The response to each request, generated without any other."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.found: dict[tuple[bytes, int, Sampling], Completion] = {}

    def __call__(self, request: Request) -> Completion:
        key = request.prompt.tobytes(), request.seed, request.sampling
        if key not in self.found:
            engine = HfEngine(self.model.hf, EOS)
            self.found[key] = complete(engine, [request.prompt], [request.seed], request.sampling)[0]
        return self.found[key]


@pytest.fixture(scope="module")
def alone(model: CausalLM) -> Alone:
    return Alone(model)


NEW = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 2), st.sampled_from(SAMPLINGS))
CALLS = st.lists(st.one_of(st.lists(NEW, max_size=6), st.integers(1, 6), st.none()), max_size=12)


@settings(deadline=None, max_examples=60)
@given(calls=CALLS, max_num_seqs=st.sampled_from([1, 2, 3, 9, 20]), checks=st.sampled_from([1, 3]))
def test_a_response_does_not_depend_on_other_requests_or_slices(
    model: CausalLM, alone: Alone, calls: list[Any], max_num_seqs: int, checks: int
) -> None:
    engine = HfEngine(model.hf, EOS, max_num_seqs)
    added: list[Request] = []
    found: list[tuple[int, Completion]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STEPS_BETWEEN_CHECKS, "cpu", checks)
        for call in calls:
            if call is None:
                engine.sleep()
            elif isinstance(call, int):
                for _ in range(call):
                    found += engine.advance(0, 0)
            else:
                new = [Request(len(added) + number, *each) for number, each in enumerate(call)]
                engine.add(new)
                added += new
            assert engine.running == len(added) - len(found)
        found += engine.advance(math.inf, 0)
    assert engine.running == 0
    assert sorted(number for number, _ in found) == list(range(len(added)))
    for number, completion in found:
        expected = alone(added[number])
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)
        assert completion.finished == expected.finished
        assert completion.spans == (Span(0, len(completion.token_ids)),)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_another_engine_continues_what_one_gives_back(model: CausalLM, alone: Alone, steps: int) -> None:
    added = requests_of(PROMPTS, Sampling(9, temperature=0))
    engine, other = (HfEngine(model.hf, EOS, max_num_seqs=3) for _ in range(2))
    engine.add(added)
    found: dict[int, Completion] = {}
    for _ in range(steps):
        found.update(engine.advance(0, 4))
    unfinished = engine.unfinished
    begun = engine.withdraw()
    assert unfinished == sum(len(part.token_ids) for part in begun.values()) and (steps > 0) == bool(begun)
    assert engine.running == engine.unfinished == 0 and not any(part.finished for part in begun.values())
    left = [request for request in added if request.number not in found]
    other.add([request.after(begun[request.number]) if request.number in begun else request for request in left])
    for number, rest in until_empty(other, version=5).items():
        found[number] = begun[number].then(rest) if number in begun else rest
    for request in added:
        expected, whole = alone(request), found[request.number]
        assert whole.token_ids.tolist() == expected.token_ids.tolist() and whole.finished == expected.finished
        np.testing.assert_allclose(whole.logprobs, expected.logprobs, atol=1e-4)
        first = len(begun[request.number].token_ids) if request.number in begun else 0
        spans = [Span(4, first), Span(5, len(whole.token_ids) - first)] if request in left else whole.spans
        assert list(whole.spans) == [span for span in spans if span.tokens]


def test_the_rest_of_a_response_is_drawn_with_other_numbers() -> None:
    begun = Completion(np.array([7, 8], np.int32), np.zeros(2, np.float32), False)
    rest = Request(3, PROMPTS[1], SEEDS - 1, Sampling(9, 0.5, top_k=4)).after(begun)
    assert rest.number == 3 and rest.prompt.tolist() == [*PROMPTS[1].tolist(), 7, 8]
    assert rest.seed == 1 and rest.sampling == Sampling(7, 0.5, top_k=4)


def test_a_slice_ends_after_a_step_or_when_nothing_is_left(model: CausalLM) -> None:
    engine = HfEngine(model.hf, ())
    assert engine.advance(math.inf, 0) == []
    engine.add(requests_of(PROMPTS, Sampling(3)))
    with counted_tokens(model) as counts:
        assert engine.advance(0, 0) == []
        assert engine.advance(-1, 0) == []
        assert engine.running == 4
        assert sorted(number for number, _ in engine.advance(0, 0)) == [0, 1, 2, 3]
    assert counts == [6 + 19 + 2, 4, 4, 4]
    engine.add(requests_of(PROMPTS, Sampling(3)))
    assert len(engine.advance(math.inf, 0)) == 4


def test_what_has_ended_is_returned_at_the_end_of_a_slice(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS_BETWEEN_CHECKS, "cpu", 100)
    greedy = Sampling(9, temperature=0)
    [whole] = complete(HfEngine(model.hf, ()), PROMPTS[:1], [0], greedy)
    engine = HfEngine(model.hf, {int(whole.token_ids[0])})
    engine.add(requests_of(PROMPTS[:1], greedy))
    [(_, completion)] = engine.advance(0, 0)
    assert completion.finished and len(completion.token_ids) == 1


def test_requests_enter_in_their_order(model: CausalLM) -> None:
    engine = HfEngine(model.hf, (), max_num_seqs=2)
    engine.add(requests_of(PROMPTS, Sampling(2)))
    found = engine.advance(0, 0)
    engine.add(requests_of(PROMPTS[:2], Sampling(2), first=4))
    while engine.running:
        found += engine.advance(0, 0)
    assert [{number for number, _ in found[start : start + 2]} for start in (0, 2, 4)] == [{0, 1}, {2, 3}, {4, 5}]


@pytest.mark.parametrize(("rows", "free"), [(8, 1), (9, 2), (16, 2), (17, 3)])
def test_waiting_requests_enter_if_an_eighth_of_the_rows_is_free(model: CausalLM, rows: int, free: int) -> None:
    engine = HfEngine(model.hf, (), max_num_seqs=rows)
    steps = [1, 2, 3, 4, *[9] * (rows + free - 4)]
    engine.add([Request(number, PROMPTS[1], number, Sampling(count)) for number, count in enumerate(steps)])
    with counted_tokens(model) as counts:
        for _ in range(free + 1):
            engine.advance(0, 0)
    assert counts == [*range(rows, rows - free, -1), rows]


def test_a_single_request_enters_at_once_if_the_batch_is_small(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    grow = KVCache.grow
    monkeypatch.setattr(KVCache, "grow", lambda cache, *sizes: rows.append(sizes[0]) or grow(cache, *sizes))
    engine = HfEngine(model.hf, (), max_num_seqs=10)
    with counted_tokens(model) as counts:
        for number in range(9):
            engine.add(requests_of(PROMPTS[1:2], Sampling(20), number))
            engine.advance(0, 0)
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert rows == [2, 4, 8, 10]


def test_what_is_running_is_kept_when_longer_requests_enter(model: CausalLM, alone: Alone) -> None:
    engine = HfEngine(model.hf, EOS)
    complete(engine, prompts([40]) * 2, range(2), Sampling(1))  # leaves a cache with more columns
    added: list[Request] = []
    found: dict[int, Completion] = {}
    for length, steps in ((4, 10), (4, 12), (5, 12), (50, 40)):
        new = [
            Request(len(added) + n, prompt, 20 + n, Sampling(steps)) for n, prompt in enumerate(prompts([length] * 2))
        ]
        engine.add(new)
        added += new
        found.update(engine.advance(0, 0))
    assert engine.running > 4
    assert in_order(found | until_empty(engine)) == token_lists([alone(request) for request in added])


def test_a_prompt_is_copied_from_a_row_that_has_generated_tokens(model: CausalLM, alone: Alone) -> None:
    added = requests_of([PROMPTS[2]] * 3, Sampling(8))
    engine = HfEngine(model.hf, EOS)
    engine.add(added[:1])
    with counted_tokens(model) as counts:
        assert engine.advance(0, 0) == []
        engine.advance(0, 0)
        engine.add(added[1:])
        found = until_empty(engine)
    assert counts[:4] == [19, 1, 1, 3]
    assert in_order(found) == token_lists([alone(request) for request in added])


def test_greedy_and_sampled_tokens_are_drawn_in_one_pass(model: CausalLM, alone: Alone) -> None:
    samplings = [*SAMPLINGS, Sampling(5, temperature=0), Sampling(8, top_k=4, truncated_logprobs=True)]
    added = [Request(number, PROMPTS[1], 7, sampling) for number, sampling in enumerate(samplings)]
    engine = HfEngine(model.hf, EOS)
    engine.add(added)
    with counted_tokens(model) as counts:
        found = until_empty(engine)
    assert counts[0] == len(samplings) and len(counts) == max(len(c.token_ids) for c in found.values())
    for request in added:
        expected = alone(request)
        assert found[request.number].token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(found[request.number].logprobs, expected.logprobs, atol=1e-4)


def next_tokens(model: CausalLM, request: Request, known: Sequence[int], steps: int) -> list[int]:
    """Return the tokens that follow the known ones, each from a forward pass over everything before it."""
    tokens = list(known)
    uniform_S = torch.from_numpy(uniforms([request.seed], request.sampling.max_new_tokens))[0]
    while len(tokens) < steps:
        text = np.append(request.prompt, np.array([*tokens, 0], np.int32))
        batch = pack_samples([text], [np.arange(len(text)) == len(text) - 1])
        with torch.no_grad():
            logits_BV = model(batch, lambda h, w: h @ w.t())[:1]
            now = uniform_S[len(tokens)][None]
            token_B, _ = sample(logits_BV, now, request.sampling, torch.empty_like(logits_BV))
        tokens.append(int(token_B))
    return tokens


KINDS = [{}, {"kind": "mistral", "sliding_window": 6}, {"kind": "lfm2", "layer_types": ["conv", "full_attention"]}]


@pytest.mark.parametrize("settings", KINDS, ids=["full", "windows", "states"])
def test_responses_continue_with_new_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    old, new = (sharp_model(tmp_path / name, **settings) for name in ("old", "new"))
    with torch.no_grad():
        for parameter in new.hf.parameters():
            parameter.copy_(parameter.flip(0))
    engine = HfEngine(sharp_model(tmp_path / "engine", **settings).hf, (), max_num_seqs=3)
    samplings = [Sampling(2, 0.8), Sampling(9), Sampling(12, temperature=0), Sampling(9, top_k=9), Sampling(4)]
    given = [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[2], PROMPTS[3]]
    added = [Request(number, *each) for number, each in enumerate(zip(given, range(5), samplings, strict=True))]
    engine.add(added)
    found = dict(engine.advance(0, 4) + engine.advance(0, 4) + engine.advance(0, 4))  # number 3 copies its prompt
    assert set(found) == {0}
    engine.load_weights(new.hf.named_parameters())
    found |= until_empty(engine, 0, 6)
    before = [2, 3, 3, 1, 0]  # tokens of the old weights
    for request, steps, known in zip(added, [s.max_new_tokens for s in samplings], before, strict=True):
        completion = found[request.number]
        first = next_tokens(old, request, [], known)
        assert completion.token_ids.tolist() == next_tokens(new, request, first, steps)
        assert completion.spans == tuple(span for span in (Span(4, known), Span(6, steps - known)) if span.tokens)
        temperature = request.sampling.temperature or 1.0
        of_old, of_new = (forward_logprobs(m, [request.prompt], [completion], temperature) for m in (old, new))
        expected = np.concatenate([of_old[:known], of_new[known:]])
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_prompt_is_copied_from_a_row_that_new_weights_have_computed(tmp_path: Path) -> None:
    engine = HfEngine(load_model(ModelConfig(path=str(make_tiny_model(tmp_path / "a")))).hf, ())
    new = sharp_model(tmp_path / "b")
    engine.add(requests_of([PROMPTS[2]], Sampling(8)))
    engine.advance(0, 0)
    engine.load_weights(new.hf.named_parameters())
    late = requests_of([PROMPTS[2]], Sampling(8), 1)
    engine.add(late)
    found = until_empty(engine, version=1)
    assert found[1].token_ids.tolist() == next_tokens(new, late[0], [], 8)
    assert found[0].spans == (Span(0, 1), Span(1, 7)) and found[1].spans == (Span(1, 8),)


def test_only_a_new_version_is_computed_again(model: CausalLM) -> None:
    engine = HfEngine(model.hf, ())
    engine.add(requests_of([PROMPTS[0], PROMPTS[2]], Sampling(6)))
    with counted_tokens(model) as counts:
        for version in (3, 3, 5, 5, 4):
            assert engine.advance(0, version) == []
        found = dict(engine.advance(math.inf, 4))
    # In the cache: the prompt, and the response without its last token.
    assert counts == [6 + 19, 2, 2, 7 + 1 + 20 + 1, 2, 2, 7 + 3 + 20 + 3, 2, 2]
    assert found[0].spans == found[1].spans == (Span(3, 2), Span(5, 2), Span(4, 2))
    whole = complete(HfEngine(model.hf, ()), [PROMPTS[0], PROMPTS[2]], range(2), Sampling(6))
    assert in_order(found) == token_lists(whole)


def test_memory_does_not_grow_with_the_number_of_requests(model: CausalLM) -> None:
    engine = HfEngine(model.hf, EOS, max_num_seqs=4)
    cycle = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    engine.add([Request(-1, max(PROMPTS, key=len), 0, SAMPLINGS[2]) for _ in range(6)])
    engine.advance(0, 0)
    first = held_bytes(engine)
    number = 0
    for _ in range(200):
        while engine.running < 6:
            prompt, sampling = cycle[number % len(cycle)]
            engine.add(requests_of([prompt], sampling, number))
            number += 1
        engine.advance(0, 0)
        # Smaller parts differ: which rows belong to which sampling, the prompts that wait.
        assert held_bytes(engine) < first + 1000
    assert number > 60
    until_empty(engine)
    idle = held_bytes(engine)
    engine.sleep()
    # Without requests only the cache is left: 2 layers, keys and values, 4 rows of 33 columns, one head of 16.
    assert idle - held_bytes(engine) == 2 * 2 * 4 * 33 * 16 * 4


def held_bytes(engine: HfEngine) -> int:
    """Return the memory of all tensors and arrays that the engine holds, without those of the model."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [value for name, value in vars(engine).items() if name != "hf"]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, torch.nn.Parameter | torch.nn.Module):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, np.ndarray):
            found[item.ctypes.data] = item.nbytes
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple | deque):
            left += item
        elif hasattr(item, "__dict__"):
            left += vars(item).values()
    return sum(found.values())


def test_the_cache_is_kept_while_responses_are_incomplete(model: CausalLM, alone: Alone) -> None:
    added = requests_of(PROMPTS, Sampling(13))
    engine = HfEngine(model.hf, EOS)
    engine.add(added)
    found = dict(engine.advance(0, 0))
    with counted_tokens(model) as counts:
        engine.sleep()
        engine.wake()
        found |= until_empty(engine)
    assert max(counts) <= 4  # nothing was computed again
    assert in_order(found) == token_lists([alone(request) for request in added])


def test_a_request_that_is_too_long_is_refused_when_it_is_added(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, max_position_embeddings=40))))
    engine = HfEngine(model.hf, ())
    # Each alone fits, the longest prompt with the longest response does not.
    fitting = [*requests_of(prompts([38]), Sampling(2)), *requests_of(prompts([2]), Sampling(38), 1)]
    engine.add(fitting)
    with pytest.raises(UserError, match="prompt of 2 tokens and a response of 39 exceed the model's 40 positions"):
        engine.add([fitting[0], replace(fitting[1], sampling=Sampling(39))])
    assert engine.running == 2
    assert [len(tokens) for tokens in in_order(until_empty(engine))] == [2, 38]
