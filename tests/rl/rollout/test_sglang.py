"""The engine `sglang` with a server of ours that speaks its HTTP API (tests/rl/sglang_api) and has a real model."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.rollout import sglang, sglang_server
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Sampling, Span, complete
from hpc_rl.rl.rollout.http_calls import HttpClient
from hpc_rl.rl.rollout.sglang import SglangEngine, _Running, joined, load, request_body, server_settings
from hpc_rl.rl.weights.base import WeightReceiver, receiver_of
from hpc_rl.rl.weights.buckets import pack
from hpc_rl.training.models.causal_lm import CausalLM
from tests.host.test_processes import is_alive, until
from tests.rl.ppo_config import ppo_config
from tests.rl.rollout.tiny_engine import forward_logprobs, prompts, sharp_model, token_lists

SERVERS = Path(__file__).parents[1] / "sglang_api"
EOS = range(12)
"""Several tokens, so that some responses end early."""
DEADLINE_S = 600
SEEDED = "rollout.engine_kwargs.enable_deterministic_inference=true"


@pytest.fixture(scope="module", autouse=True)
def servers_are_found() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SERVERS), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("sglang") / "model"
    model = sharp_model(folder)
    model.hf.save_pretrained(folder)
    return folder


@contextmanager
def started(folder: Path, *options: str, sleeps: bool = False, log: Path | None = None) -> Iterator[SglangEngine]:
    config = ppo_config(
        "rollout.name=sglang", f"model.path={folder}", "rollout.max_num_seqs=4", "trainer.device=cpu", *options
    )
    engine = load(config, EOS, Placement("cpu", sleeps=sleeps, log=log or folder.with_name("server.log")), None)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SglangEngine]:
    with started(folder, SEEDED, "rollout.engine_kwargs.enable_memory_saver=true", sleeps=True) as engine:
        yield engine


@pytest.fixture
def model(engine: SglangEngine, folder: Path) -> CausalLM:
    """The model in this process, whose weights the server has too."""
    from hpc_rl.config.training import ModelConfig
    from hpc_rl.training.models.causal_lm import load_model

    model = load_model(ModelConfig(path=str(folder), dtype="float32"))
    engine.load_weights(named(model))
    return model


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


def respond(engine: SglangEngine, seeds: Sequence[int] = range(7), **sampling: Any) -> list[Completion]:
    return complete(engine, prompts(), list(seeds), Sampling(**{"max_new_tokens": 12, **sampling}))


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


def test_requests_that_are_not_complete_continue_with_new_weights(engine: SglangEngine, model: CausalLM) -> None:
    """With keys of the old weights, the log-probabilities would be others."""
    old = copy.deepcopy(model)
    several = prompts() * 3
    engine.add([Request(number, prompt, number, Sampling(100)) for number, prompt in enumerate(several)])
    found: dict[int, Completion] = {}
    while len(found) < 3:
        found.update(engine.advance(0.0, 4))
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


def test_a_sleep_loses_the_weights_and_an_update_brings_them_back(engine: SglangEngine, model: CausalLM) -> None:
    engine.sleep()
    engine.sleep()
    change(model)
    engine.load_weights(named(model))
    engine.wake()
    check(model, respond(engine))
    engine.wake()


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


def test_a_request_that_is_too_long_is_refused(folder: Path) -> None:
    """The server refuses a prompt without room, and cuts off a response."""
    with started(folder, "rollout.engine_kwargs.context_length=40") as engine:
        for prompt, words in ((np.full(50, 5), "refused a request"), (prompts()[5], "ended it after 10: raise")):
            engine.add([Request(0, prompt.astype(np.int32), 0, Sampling(500, top_k=1))])
            with pytest.raises(UserError, match=rf"rollout\.name=sglang: .*{words}.*rollout\.engine_kwargs"):
                while engine.running:
                    engine.advance(0.1, 0)


def ended_engine(engine: SglangEngine) -> int:
    """Generate until the engine ends its process; return the exit code."""
    with pytest.raises(SystemExit) as caught:
        respond(engine)
    assert engine._server._process.poll() is not None
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_a_server_that_dies_ends_the_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(folder, "+rollout.engine_kwargs.dies_after=2") as engine:
        assert ended_engine(engine) == 7
    printed = capsys.readouterr().out
    assert "its exit code was 7" in printed and "no space left on this planet" in printed


def test_a_server_that_is_killed_ends_the_engine(folder: Path) -> None:
    with started(folder) as engine:
        engine._server._process.send_signal(signal.SIGKILL)
        assert ended_engine(engine) == 137


def test_a_server_that_fails_ends_with_its_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(folder, "+rollout.engine_kwargs.fails_after=2") as engine:
        assert ended_engine(engine) == 1
    assert "/generate: the server answered 500: an error of the scheduler" in capsys.readouterr().out


def test_a_server_that_hangs_ends_with_its_engine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "PROBE_S", 0.1)
    with started(folder, "+rollout.engine_kwargs.hangs=true", "rollout.stall_s=2") as engine:
        assert ended_engine(engine) == 1
    assert "no response, and no answer to /health, for 2 s (rollout.stall_s)" in capsys.readouterr().out


def test_a_slow_server_is_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers /health while it generates, although no response is complete for longer than the limit."""
    monkeypatch.setattr(sglang, "PROBE_S", 0.1)
    with started(folder, "+rollout.engine_kwargs.step_s=1", "rollout.stall_s=3") as engine:
        (found,) = complete(engine, prompts()[:1], [0], Sampling(6, temperature=0.0))
        assert found.finished or len(found.token_ids) == 6


def test_an_update_that_fails_ends_the_engine(
    folder: Path, model: CausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(folder, "+rollout.engine_kwargs.bad_update=true") as engine, pytest.raises(SystemExit):
        engine.load_weights(named(model))
    assert "/update_weights_from_disk: the server answered 400: size mismatch" in capsys.readouterr().out


def test_a_server_that_does_not_start_in_time_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "START_SHARE", 0.001)
    message = r"sglang\.launch_server was not ready within 2 s: raise trainer\.model_timeout_s, or use another engine"
    with (
        pytest.raises(RunError, match=message),
        started(folder, "+rollout.engine_kwargs.never_ready=true", "trainer.model_timeout_s=1800"),
    ):
        pass


def test_a_server_that_ends_at_its_start_is_shown_with_its_log(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "node0-engine0-server.log"
    text = "unrecognized arguments: --no-such-option"
    with pytest.raises(RunError) as caught, started(folder, f"+rollout.engine_kwargs.ends_at_start='{text}'", log=log):
        pass
    assert str(caught.value).startswith("rollout.name=sglang: python -m sglang.launch_server ended with exit code 3: ")
    assert f"the end of {log}:" in str(caught.value) and text in str(caught.value)
    assert "again, ****" in str(caught.value) and "'api-key': '****" in str(caught.value)
    assert log.stat().st_mode & 0o777 == 0o600


def test_only_the_engine_can_use_its_server(engine: SglangEngine) -> None:
    """The arguments of a process are no secret on a node."""
    client, log = engine._server.client, engine._server._log
    key = client._key
    assert log is not None
    shown = log.read_text()
    assert key not in shown and f"'api-key': '{'*' * len(key)}'" in shown and "ready to roll!" in shown
    assert key is not None and len(key) > 30 and client.url.startswith("http://127.0.0.1:")
    for other in (None, "guess"):
        assert HttpClient(client.url, other, uses_proxies=False).post("/flush_cache", {}, 60).status == 401
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key.encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_the_server_and_its_children_end_with_the_engine(folder: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    with started(folder, f"+rollout.engine_kwargs.leaves_child={child}") as engine:
        pids = [engine._server._process.pid, int(child.read_text())]
        assert all(map(is_alive, pids)) and os.getpgid(pids[0]) != os.getpgid(0)
    until(lambda: not any(map(is_alive, pids)))


def test_the_server_and_its_children_end_with_an_engine_that_is_killed(folder: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "import time; from pathlib import Path; from tests.rl.rollout import test_sglang\n"
        f"with test_sglang.started(Path({str(folder)!r}), '+rollout.engine_kwargs.leaves_child={child}') as engine:\n"
        "    print(engine._server._process.pid, flush=True); time.sleep(100000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = threading.Timer(DEADLINE_S, process.kill)
        watch.start()
        pids = [int(process.stdout.readline()), int(child.read_text())]
        watch.cancel()
        assert all(map(is_alive, pids))
        process.kill()
    until(lambda: not any(map(is_alive, pids)))


def test_ports_are_free_and_below_the_ephemeral_range() -> None:
    ports = {sglang_server.free_port() for _ in range(20)}
    assert len(ports) > 15 and all(10_000 <= port < 32_768 for port in ports)


def test_settings_by_placement(folder: Path) -> None:
    def settings(placement: Placement, *options: str) -> dict[str, Any]:
        device = f"trainer.device={placement.device}"
        config = ppo_config("rollout.name=sglang", f"model.path={folder}", device, *options)
        return server_settings(config.model, config.rollout, placement)

    cpu = settings(Placement("cpu"))
    shared = settings(Placement("cuda", sleeps=True, gpu_share=0.5))
    alone = settings(Placement("cuda"))
    assert (cpu["dtype"], shared["dtype"], cpu["device"]) == ("float32", "bfloat16", "cpu")
    assert shared["enable-memory-saver"] and not alone["enable-memory-saver"] and "enable-memory-saver" not in cpu
    assert shared["mem-fraction-static"] == 0.5 and not {"mem-fraction-static"} & ({*alone} | {*cpu})
    assert settings(Placement("cuda"), "rollout.gpu_memory_utilization=0.7")["mem-fraction-static"] == 0.7
    own = settings(
        Placement("cpu"), "+rollout.engine_kwargs={attention_backend: triton, max_running_requests: 3, dtype: null}"
    )
    assert own["attention-backend"] == "triton" and own["max-running-requests"] == 3 and "dtype" not in own
    json.dumps(own)


def test_spans_of_one_version_are_joined() -> None:
    assert joined([]) == ()
    assert joined([Span(1, 2), Span(1, 3), Span(2, 1)]) == (Span(1, 5), Span(2, 1))


def told(reason: str, *tokens: int) -> dict[str, Any]:
    steps = {"output_token_logprobs": [[-0.5, token, None] for token in tokens]}
    return {"finish_reason": {"type": reason}, **(steps if tokens else {})}


def running(most: int) -> _Running:
    return _Running(Request(3, np.array([8, 9], np.int32), 7, Sampling(most, 0.6, 0.9, 20)))


def test_an_interrupted_request_continues_where_it_was() -> None:
    request = running(5)
    assert request.answered(told("abort")).ended is None and request.rest() == request.request.sampling
    request.version = 1
    assert request.answered(told("abort", 4, 5, 6)).ended is None
    assert request.prompt() == [8, 9, 4, 5, 6] and request.rest() == Sampling(2, 0.6, 0.9, 20)
    request.version = 2
    found = request.answered(told("length", 1, 2)).completion()
    assert found.token_ids.tolist() == [4, 5, 6, 1, 2] and found.logprobs.tolist() == [-0.5] * 5
    assert found.spans == (Span(1, 3), Span(2, 2)) and not found.finished
    assert running(5).answered(told("stop", 1)).completion().finished


def test_a_request_that_was_complete_when_it_was_interrupted_is_complete() -> None:
    assert running(2).answered(told("abort", 4, 5)).ended == "length"
    with pytest.raises(
        UserError, match=r"up to 3 tokens to a prompt of 2 was requested, and .* ended it after 2: raise"
    ):
        running(3).answered(told("length", 4, 5))


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
