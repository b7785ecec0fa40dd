"""What the engine `sglang` sends and returns, with a server of ours (tests/rl/rollout/sglang/api)."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling, Span, complete, joined
from hpc_rl.rl.rollout.sglang import engine as sglang
from hpc_rl.rl.rollout.sglang.engine import SglangEngine, _Running, request_body
from hpc_rl.rl.weights.base import WeightReceiver, receiver_of
from hpc_rl.rl.weights.buckets import pack
from hpc_rl.training.models.causal_lm import CausalLM
from tests.rl.rollout.sglang.engines import EOS, make_model, respond, started
from tests.rl.rollout.tiny_engine import forward_logprobs, prompts, token_lists

SEEDED = "rollout.engine_kwargs.enable_deterministic_inference=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SglangEngine]:
    with started(folder, SEEDED, "rollout.engine_kwargs.enable_memory_saver=true", sleeps=True) as engine:
        yield engine


@pytest.fixture
def model(engine: SglangEngine, folder: Path) -> CausalLM:
    """The model in this process, whose weights the server has too."""
    model = loaded(folder)
    engine.load_weights(named(model))
    return model


def loaded(folder: Path) -> CausalLM:
    from hpc_rl.config.training.common import ModelConfig
    from hpc_rl.training.models.causal_lm import load_model

    return load_model(ModelConfig(path=str(folder), dtype="float32"))


def named(model: CausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach()) for name, weight in model.hf.named_parameters()]


def change(model: CausalLM) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.hf.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def check(model: CausalLM, found: Sequence[Completion], temperature: float = 1.0) -> None:
    """Assert that log-probabilities are those of the model in this process."""
    expected = forward_logprobs(model, prompts()[: len(found)], found, temperature)
    np.testing.assert_allclose(np.concatenate([each.logprobs for each in found]), expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_models(engine: SglangEngine, model: CausalLM, temperature: float) -> None:
    check(model, respond(engine, temperature=temperature), temperature)
    check(model, respond(engine, temperature=temperature, top_p=0.5, top_k=20), temperature)
    greedy = respond(engine, temperature=0.0)
    check(model, greedy)
    assert token_lists(greedy) == token_lists(respond(engine, range(7, 14), temperature=0.0))


def test_top_p_and_top_k_limit_what_is_drawn(engine: SglangEngine, model: CausalLM) -> None:
    greedy = token_lists(respond(engine, temperature=0.0))
    assert token_lists(respond(engine, top_k=1)) == greedy
    assert token_lists(respond(engine, top_p=1e-6)) == greedy
    assert token_lists(respond(engine)) != greedy


def test_a_response_ends_with_an_end_token_or_at_its_limit(engine: SglangEngine, model: CausalLM) -> None:
    completions = complete(engine, prompts() * 4, range(28), Sampling(12))
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        ends = [token in EOS for token in completion.token_ids]
        assert not any(ends[:-1]) and ends[-1] == completion.finished
        assert completion.finished or len(completion.token_ids) == 12


def test_a_response_depends_on_its_seed_and_not_on_other_responses(engine: SglangEngine, model: CausalLM) -> None:
    first = respond(engine)
    again = complete(engine, prompts()[::-1], list(range(7))[::-1], Sampling(12))[::-1]
    assert token_lists(first) == token_lists(again) != token_lists(respond(engine, range(7, 14)))


@pytest.mark.parametrize("bucket_bytes", [20_000, 10**9])
def test_after_a_sync_the_new_weights_are_used(engine: SglangEngine, model: CausalLM, bucket_bytes: int) -> None:
    """The server's cache has what old weights computed for these prompts."""
    assert receiver_of(engine) is engine and isinstance(engine, WeightReceiver)
    before = respond(engine)
    for _ in range(2):
        change(model)
        engine.start_weight_update()
        for bucket in pack(named(model), bucket_bytes):
            engine.update_weights(bucket)
        engine.finish_weight_update()
        after = respond(engine)
        check(model, after)
        assert token_lists(after) != token_lists(before)
        before = after


def test_a_sync_leaves_no_files(
    engine: SglangEngine, model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine.load_weights(named(model))
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_explained(engine: SglangEngine, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sglang.safetensors_files, "write", full)
    with pytest.raises(RunError, match=r"model-00001\.safetensors could not be written: .*space"):
        engine.load_weights(named(model))


def test_requests_that_are_not_complete_continue_with_new_weights(folder: Path, tmp_path: Path) -> None:
    """With keys of the old weights, the log-probabilities would be others."""
    model = loaded(folder)
    old = copy.deepcopy(model)
    several = prompts() * 3
    log = tmp_path / "engine-server.log"
    with started(folder, SEEDED, "+rollout.engine_kwargs.holds_after=3", log=tmp_path / "engine.log") as engine:
        engine.add([Request(number, prompt, number, Sampling(100)) for number, prompt in enumerate(several)])
        found: dict[int, Completion] = {}
        while len(found) < 3 or "a response waits" not in log.read_text():
            found.update(engine.advance(0.01, 4))
        change(model)
        engine.load_weights(named(model))
        assert engine.running == len(several) - len(found)
        while engine.running:
            found.update(engine.advance(0.01, 5))
    continued = 0
    for number, prompt in enumerate(several):
        response = found[number]
        total = len(response.token_ids)
        assert sum(span.tokens for span in response.spans) == total
        first = sum(span.tokens for span in response.spans if span.version == 4)
        continued += [span.version for span in response.spans] == [4, 5]
        for computed, rows in ((old, slice(0, first)), (model, slice(first, total))):
            expected = forward_logprobs(computed, [prompt], [response])
            np.testing.assert_allclose(response.logprobs[rows], expected[rows], atol=1e-4)
    assert continued, "no request was running when the weights changed"


def test_an_interrupted_response_is_what_it_would_have_been(engine: SglangEngine, model: CausalLM) -> None:
    """The same weights arrive again and again, in the middle of responses."""
    expected = complete(engine, prompts(), range(7), Sampling(100))
    engine.add([Request(number, prompt, number, Sampling(100)) for number, prompt in enumerate(prompts())])
    found: dict[int, Completion] = {}
    while engine.running:
        found.update(engine.advance(0.05, 0))
        engine.load_weights(named(model))
    assert token_lists([found[number] for number in range(7)]) == token_lists(expected)
    assert {completion.spans for completion in found.values()} == {
        (Span(0, len(completion.token_ids)),) for completion in expected
    }


def test_what_is_given_back_continues_as_another_request(engine: SglangEngine, model: CausalLM) -> None:
    greedy = Sampling(100, temperature=0)
    expected = complete(engine, prompts(), range(7), greedy)
    requests = [Request(number, prompt, number, greedy) for number, prompt in enumerate(prompts())]
    engine.add(requests)
    found = dict(engine.advance(0.05, 0))
    begun = engine.withdraw()
    found.update(engine.advance(0.0, 0))
    assert not engine.running and not engine.unfinished
    missing = [request for request in requests if request.number not in found]
    engine.add([request.after(begun[request.number]) if request.number in begun else request for request in missing])
    while engine.running:
        for number, rest in engine.advance(0.05, 0):
            found[number] = begun[number].then(rest) if number in begun else rest
    assert token_lists([found[number] for number in range(7)]) == token_lists(expected)


def test_a_sleep_loses_the_weights_and_an_update_brings_them_back(engine: SglangEngine, model: CausalLM) -> None:
    engine.sleep()
    engine.sleep()
    change(model)
    engine.load_weights(named(model))
    engine.wake()
    check(model, respond(engine))
    engine.wake()


@pytest.mark.long
def test_an_engine_that_does_not_share_its_gpu_stays_awake(folder: Path) -> None:
    with started(folder) as engine:
        engine.sleep()
        assert respond(engine)
        assert respond(engine)[0].token_ids.tolist(), "without deterministic inference, seeds are not needed"


def test_no_more_requests_are_sent_than_the_server_has_room_for(engine: SglangEngine, model: CausalLM) -> None:
    engine.add([Request(number, prompts()[0], number, Sampling(3)) for number in range(20)])
    engine.advance(0.0, 0)
    assert len(engine._sent) <= 5
    found: list[int] = []
    while engine.running:
        found += [number for number, _ in engine.advance(0.0, 0)]
    assert engine.advance(0.0, 0) == []


@pytest.mark.long
def test_a_request_that_is_too_long_is_refused(folder: Path) -> None:
    """The server refuses a prompt without room, and cuts off a response."""
    with started(folder, "rollout.engine_kwargs.context_length=40") as engine:
        for prompt, words in ((np.full(50, 5), "refused a request"), (prompts()[5], "ended it after 10: raise")):
            engine.add([Request(0, prompt.astype(np.int32), 0, Sampling(500, top_k=1))])
            with pytest.raises(UserError, match=rf"rollout\.name=sglang: .*{words}.*rollout\.engine_kwargs"):
                while engine.running:
                    engine.advance(0.1, 0)


@pytest.mark.long
def test_an_update_that_fails_ends_the_engine(
    folder: Path, model: CausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(folder, "+rollout.engine_kwargs.bad_update=true") as engine, pytest.raises(SystemExit):
        engine.load_weights(named(model))
    assert "/update_weights_from_disk: the server answered 400: size mismatch" in capsys.readouterr().out


def test_spans_of_one_version_are_joined() -> None:
    assert joined([]) == ()
    assert joined([Span(1, 2), Span(1, 3), Span(2, 1)]) == (Span(1, 5), Span(2, 1))


ENDS = (99,)


def told(reason: str, *tokens: int) -> dict[str, Any]:
    steps = {"output_token_logprobs": [[-0.5, token, None] for token in tokens]}
    return {"finish_reason": {"type": reason}, **(steps if tokens else {})}


def running(most: int) -> _Running:
    return _Running(Request(3, np.array([8, 9], np.int32), 7, Sampling(most, 0.6, 0.9, 20)))


def test_an_interrupted_request_continues_where_it_was() -> None:
    request = running(5)
    assert request.answered(told("abort"), ENDS).ended is None and request.rest() == request.request.sampling
    request.version = 1
    assert request.answered(told("abort", 4, 5, 6), ENDS).ended is None
    assert request.prompt() == [8, 9, 4, 5, 6] and request.rest() == Sampling(2, 0.6, 0.9, 20)
    request.version = 2
    found = request.answered(told("length", 1, 2), ENDS).completion()
    assert found.token_ids.tolist() == [4, 5, 6, 1, 2] and found.logprobs.tolist() == [-0.5] * 5
    assert found.spans == (Span(1, 3), Span(2, 2)) and not found.finished
    assert running(5).answered(told("stop", 1), ENDS).completion().finished


def test_a_request_that_was_complete_when_it_was_interrupted_is_complete() -> None:
    assert running(2).answered(told("abort", 4, 5), ENDS).ended == "length"
    assert running(5).answered(told("abort", 4, 99), ENDS).ended == "stop"
    assert running(5).answered(told("abort", 99, 4), ENDS).ended is None
    with pytest.raises(UserError, match=r"of up to 3 tokens to a prompt of 2 was .* ended it after 2: raise"):
        running(3).answered(told("length", 4, 5), ENDS)


def test_a_request_has_the_sampling_the_seed_and_the_end_tokens() -> None:
    body = request_body([8, 9], Sampling(5, 0.6, 0.9, 20), 7, [1, 2])
    assert body == {
        "input_ids": [8, 9],
        "sampling_params": {
            **{"max_new_tokens": 5, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "sampling_seed": 7},
            "stop_token_ids": [1, 2],
        },
        **{"return_logprob": True, "stream": False},
    }
    assert request_body([8], Sampling(5), 7, [])["sampling_params"]["top_k"] == -1
