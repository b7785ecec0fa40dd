"""The engine `openai` with small servers of ours: one with a real model, and some that cause trouble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.rollout import openai
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Sampling, Span, complete, load_engine
from hpc_rl.rl.rollout.openai import OpenaiEngine, logprobs_of, pause_of, request_body
from hpc_rl.training.models.causal_lm import CausalLM, load_tokenizer
from tests.http_server import serving
from tests.rl.rollout.tiny_engine import forward_logprobs, prompts, sharp_model, token_lists

KEY = "sk-a-secret"
DEADLINE_S = 600
Respond = Callable[[dict[str, Any], int], tuple[int, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openai") / "model"


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    model = sharp_model(folder)
    model.hf.save_pretrained(folder)
    return model


class Server:
    """Answers /v1/completions by a function of the request and its number, and notes what it receives."""

    def __init__(self, respond: Respond, headers: dict[str, str] | None = None) -> None:
        self.respond = respond
        self.headers = headers or {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    number = len(server.bodies)
                    server.bodies.append(body)
                    server.keys.append(self.headers["Authorization"])
                    server.running += 1
                    server.most_running = max(server.most_running, server.running)
                status, answer = (404, {}) if self.path != "/v1/completions" else server.respond(body, number)
                with server.lock:
                    server.running -= 1
                if status == 0:  # nothing
                    self.connection.close()
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        return Handler


def with_model(folder: Path, tokenizer: Any, ids: bool = True, logprobs: bool = True) -> Respond:
    """Return the most probable tokens of a model, as vLLM does; optionally without what others do not tell."""
    from transformers import AutoModelForCausalLM

    lock, hf = threading.Lock(), AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def respond(body: dict[str, Any], _: int) -> tuple[int, Any]:
        tokens, told = list(body["prompt"]), []
        with lock:
            while len(told) < body["max_tokens"]:
                logprobs_V = torch.log_softmax(hf(torch.tensor([tokens])).logits[0, -1].float(), dim=0)
                tokens.append(int(logprobs_V.argmax()))
                told.append(float(logprobs_V.max()))
                if tokens[-1] == tokenizer.eos_token_id:
                    break
        own = tokens[len(body["prompt"]) :]
        ended = own[-1] == tokenizer.eos_token_id
        choice: dict[str, Any] = {
            "text": tokenizer.decode(own, skip_special_tokens=True),
            "finish_reason": "stop" if ended else "length",
            "logprobs": {"token_logprobs": told, "tokens": list(map(str, own))} if logprobs else None,
        }
        return 200, {"choices": [{**choice, **({"token_ids": own} if ids else {})}]}

    return respond


def fixed(**choice: Any) -> Respond:
    answer = {"token_ids": [5, 6], "text": "ab", "finish_reason": "length", **choice}
    return lambda body, number: (200, {"choices": [answer]})


def config_of(folder: Path, url: str, *options: str) -> GenerateConfig:
    config = compose(
        "generate",
        [
            *(f"model.path={folder}", "data.files=prompts.jsonl", "rollout.name=openai", "trainer.device=cpu"),
            *(f"rollout.openai.base_url={url}/v1", "rollout.max_num_seqs=3", *options),
        ],
    )
    assert isinstance(config, GenerateConfig)
    return config


@contextmanager
def connected(folder: Path, server: Server, *options: str) -> Iterator[OpenaiEngine]:
    with serving(server.handler()) as url:
        engine = load_engine(config_of(folder, url, *options), Placement("cpu"))
        assert isinstance(engine, OpenaiEngine)
        yield engine
        engine.close()


def respond_to(engine: OpenaiEngine, given: Sequence[Any]) -> list[Completion]:
    return complete(engine, given, range(len(given)), Sampling(8, temperature=0.0))


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 0.02)


def test_responses_are_those_of_the_servers_model(model: CausalLM, folder: Path) -> None:
    tokenizer = load_tokenizer(config_of(folder, "http://x").model)
    server = Server(with_model(folder, tokenizer))
    with connected(folder, server) as engine:
        found = respond_to(engine, prompts())
    np.testing.assert_allclose(
        np.concatenate([each.logprobs for each in found]), forward_logprobs(model, prompts(), found), atol=1e-4
    )
    for completion in found:
        assert completion.finished == (completion.token_ids[-1] == tokenizer.eos_token_id)
        assert completion.finished or len(completion.token_ids) == 8
        assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert completion.spans == (Span(0, len(completion.token_ids)),)
    assert sorted(body["prompt"] for body in server.bodies) == sorted(prompt.tolist() for prompt in prompts())
    assert server.keys == [None] * 7 and server.most_running <= 3


def test_without_token_ids_the_text_is_tokenized(model: CausalLM, folder: Path) -> None:
    tokenizer = load_tokenizer(config_of(folder, "http://x").model)
    with connected(folder, Server(fixed(token_ids=None, text="Hello you", finish_reason="stop"))) as engine:
        (found,) = respond_to(engine, prompts()[:1])
    assert found.token_ids.tolist() == [*tokenizer.encode("Hello you"), tokenizer.eos_token_id]
    assert found.finished and np.isnan(found.logprobs).all()
    with connected(folder, Server(with_model(folder, tokenizer, ids=False, logprobs=False))) as engine:
        assert all(np.isnan(each.logprobs).all() for each in respond_to(engine, prompts()))


@pytest.mark.parametrize("choice", [{"token_ids": []}, {"text": ""}])
@pytest.mark.parametrize(("reason", "finished"), [("length", False), ("content_filter", False), ("stop", True)])
def test_an_empty_response_is_an_end_token(
    model: CausalLM, folder: Path, choice: dict[str, Any], reason: str, finished: bool
) -> None:
    tokenizer = load_tokenizer(config_of(folder, "http://x").model)
    answer = {"choices": [{**choice, "finish_reason": reason}]}
    with connected(folder, Server(lambda body, number: (200, answer))) as engine:
        (found,) = respond_to(engine, prompts()[:1])
    assert found.token_ids.tolist() == [tokenizer.eos_token_id] and found.finished == finished


def test_missing_logprobs_are_refused_only_if_they_are_to_be_written(model: CausalLM, folder: Path) -> None:
    with connected(folder, Server(fixed())) as engine:
        assert np.isnan(respond_to(engine, prompts()[:1])[0].logprobs).tolist() == [True, True]
    with (
        connected(folder, Server(fixed()), "rollout.logprobs=true") as engine,
        pytest.raises(UserError, match=r"^rollout\.logprobs=true: http://.* reports no log-probability for each token"),
    ):
        respond_to(engine, prompts()[:1])


@pytest.mark.parametrize(
    "told, expected",
    [
        ([-1.0, -2], [-1.0, -2.0]),
        ([-1.0], [np.nan, np.nan]),
        ([-1.0, None], [np.nan, np.nan]),
        (None, [np.nan, np.nan]),
    ],
)
def test_logprobs_are_one_for_each_token_or_none(told: Any, expected: list[float]) -> None:
    np.testing.assert_equal(logprobs_of({"logprobs": {"token_logprobs": told}}, 2), np.array(expected, np.float32))
    np.testing.assert_equal(logprobs_of({"logprobs": None}, 1), np.array([np.nan], np.float32))


def test_a_request_has_the_sampling_and_the_seed() -> None:
    request = Request(3, np.array([4, 5], np.int32), 99, Sampling(7, 0.6, 0.9, 20))
    body = request_body(request, "small")
    assert body == {
        **{"model": "small", "prompt": [4, 5], "max_tokens": 7, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
        **{"seed": 99, "logprobs": 1, "return_token_ids": True},
        **{"presence_penalty": 0, "frequency_penalty": 0, "min_p": 0, "repetition_penalty": 1},
    }
    json.dumps(body)
    assert request_body(Request(3, request.prompt, 99, Sampling(7)), "small")["top_k"] == -1


def test_the_key_reaches_the_server_and_nothing_else(
    model: CausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLM_KEY", KEY)
    server = Server(lambda body, number: (200, fixed()(body, number)[1]) if number else (401, {"error": "who?"}))
    options = ["rollout.openai.key_variable=LLM_KEY", "rollout.openai.model=large"]
    with connected(folder, server, *options) as engine:
        with pytest.raises(UserError, match="401: who\\?; check the key in the environment variable") as caught:
            respond_to(engine, prompts()[:1])
        assert respond_to(engine, prompts()[:1])
        assert KEY not in config_of(folder, "http://x", *options).model_dump_json()
    assert server.keys == [f"Bearer {KEY}"] * 2 and {body["model"] for body in server.bodies} == {"large"}
    assert KEY not in str(caught.value) + "".join(capfd.readouterr())


def test_a_key_that_is_not_set_is_reported(folder: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLM_KEY", raising=False)
    config = config_of(folder, "http://127.0.0.1:1", "rollout.openai.key_variable=LLM_KEY")
    with pytest.raises(UserError, match=r"is LLM_KEY, and the job has no such environment variable: `export LLM_KEY="):
        load_engine(config, Placement("cpu"))


@pytest.mark.parametrize("key", ["a\rb", "a\nb", "\u00fc"])
def test_a_value_that_is_no_key_is_reported_without_it(
    folder: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("LLM_KEY", key)
    config = config_of(folder, "http://127.0.0.1:1", "rollout.openai.key_variable=LLM_KEY")
    with pytest.raises(UserError, match="is LLM_KEY, and its value has characters that no key has") as caught:
        load_engine(config, Placement("cpu"))
    assert key not in str(caught.value)


def test_white_space_around_a_key_is_not_part_of_it(
    model: CausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_KEY", f" {KEY}\r\n")
    server = Server(fixed())
    with connected(folder, server, "rollout.openai.key_variable=LLM_KEY") as engine:
        respond_to(engine, prompts()[:1])
    assert server.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize("status", [429, 500, 503, 408, 0])
def test_errors_that_may_pass_are_tried_again(model: CausalLM, folder: Path, status: int, short_pauses: None) -> None:
    server = Server(lambda body, number: (status, {"error": "later"}) if number < 3 else fixed()(body, number))
    with connected(folder, server) as engine:
        assert token_lists(respond_to(engine, prompts()[:1])) == [[5, 6]]
    assert len(server.bodies) == 4


@pytest.mark.parametrize(
    "status, words",
    [(500, "the server answered 500: broken"), (0, "there was no answer"), (429, "the server answered 429: broken")],
)
def test_errors_that_do_not_pass_end_the_run(
    model: CausalLM, folder: Path, status: int, words: str, short_pauses: None
) -> None:
    server = Server(lambda body, number: (status, {"error": "broken"}))
    with (
        connected(folder, server, "rollout.openai.retries=2") as engine,
        pytest.raises(RunError, match=rf"/v1 was asked 3 times for a response: at last {words}.*; check the server"),
    ):
        respond_to(engine, prompts()[:1])
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    "status, advice",
    [
        (400, "lower data.max_prompt_length"),
        (403, "what it permits"),
        (404, "rollout.openai.model"),
        (418, "the server"),
    ],
)
def test_a_refusal_is_not_tried_again(model: CausalLM, folder: Path, status: int, advice: str) -> None:
    server = Server(lambda body, number: (status, {"error": {"message": "no"}}))
    with (
        connected(folder, server) as engine,
        pytest.raises(UserError, match=rf"the server answered {status}: no; .*{advice}"),
    ):
        respond_to(engine, prompts()[:1])
    assert len(server.bodies) == 1


CHAT = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "answer",
    [b"<html>login</html>", b"[]", {"choices": []}, {"choices": [{"token_ids": []}]}, CHAT],
)
def test_garbage_is_no_response(model: CausalLM, folder: Path, answer: Any) -> None:
    with (
        connected(folder, Server(lambda body, number: (200, answer))) as engine,
        pytest.raises(RunError, match=r"its answer has none: b'.*; check that rollout\.openai\.base_url is a server"),
    ):
        respond_to(engine, prompts()[:1])


def test_a_server_that_is_silent_is_given_up(model: CausalLM, folder: Path, short_pauses: None) -> None:
    over = threading.Event()

    def wait(body: dict[str, Any], number: int) -> tuple[int, Any]:
        over.wait(DEADLINE_S)
        return 0, None

    options = ["rollout.openai.retries=1", "rollout.openai.timeout_s=0.1"]
    with connected(folder, Server(wait), *options) as engine:
        with pytest.raises(RunError, match=r"asked 2 times .* there was no answer \(no answer within 0\.1 s\)"):
            respond_to(engine, prompts()[:1])
        over.set()


def test_pauses_are_those_that_the_server_asks_for() -> None:
    assert [pause_of(*each) for each in ((None, 4.0), ("7", 4.0), ("900", 4.0), ("Wed, 21 Oct", 4.0))] == [4, 7, 60, 4]


def test_responses_arrive_while_others_wait(model: CausalLM, folder: Path) -> None:
    """A slice ends although a response does not."""
    over = threading.Event()

    def respond(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["prompt"] == prompts()[0].tolist():
            over.wait(DEADLINE_S)
        return fixed()(body, number)

    with connected(folder, Server(respond)) as engine:
        engine.add([Request(number, prompt, number, Sampling(8)) for number, prompt in enumerate(prompts())])
        found: list[int] = []
        while len(found) < 6:
            found += [number for number, _ in engine.advance(0.01, 0)]
        assert sorted(found) == [1, 2, 3, 4, 5, 6] and engine.running == 1
        over.set()
        while engine.running:
            found += [number for number, _ in engine.advance(0.1, 0)]
    assert found[-1] == 0


def test_new_weights_are_refused(model: CausalLM, folder: Path) -> None:
    with connected(folder, Server(fixed())) as engine:
        engine.sleep()
        engine.wake()
        with pytest.raises(UserError, match="does not take any"):
            engine.load_weights([])
