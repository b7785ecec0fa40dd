"""The rollout engine `sglang` (https://docs.sglang.io): a server on the engine's slot, spoken to in its HTTP API.

Only the documented API is used, and SGLang is never imported:

- requests: https://docs.sglang.io/basic_usage/sampling_params.html
- weight updates and memory: https://docs.sglang.io/advanced_features/sglang_for_rl.html

The server generates between two calls of `advance` too. New weights therefore begin with the end of all its requests:
it returns what they have so far, and the rest is requested from the new weights, with prompt and response so far as the
prompt. Weights reach the server as a folder of safetensors files on the node, because this is the one of its updates
that depends neither on its version of torch nor on its processes.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from hpc_rl.config.rl.rollout import SHARED_GPU, EngineConfig, EngineJob, engine_dtype
from hpc_rl.config.training.common import ModelSource
from hpc_rl.errors import UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.process import keep_temporary_files_in_the_job, own_folder
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Sampling, Span, joined
from hpc_rl.rl.rollout.http_calls import Calls, HttpAnswer, UnreachableError
from hpc_rl.rl.rollout.sglang.server import SglangServer
from hpc_rl.rl.weights.buckets import Bucket, pack, unpack
from hpc_rl.system.files import writing
from hpc_rl.training.models import safetensors_files

if TYPE_CHECKING:
    from hpc_rl.training.models.causal_lm import CausalLM

PARTS = frozenset({"weights", "kv_cache"})
"""SGLang's names of the parts of its memory."""
START_SHARE = 0.9
"""The server's part of trainer.model_timeout_s, so that its own error comes before that of the driver."""
LOCAL_BUCKET_BYTES = 256 * 10**6
"""Size of the files in which weights are written that come from this process."""
POLL_S = 0.5
"""Longest time between two looks at the server's process."""
ABORT_S = 0.2
"""Time between two requests to end everything: one may overtake a request that is on its way."""
PROBE_S = 60.0
"""Time without a response after which the server has to show that it still generates."""
FLUSH_S = 60.0
"""Time within which a server has to end its requests, and then to become idle."""


def load(
    config: EngineJob, eos_token_ids: Collection[int], placement: Placement, policy: CausalLM | None
) -> SglangEngine:
    """Start a server with a copy of the model; see `hpc_rl.rl.rollout.engine.Loader`."""
    keep_temporary_files_in_the_job()
    start_s = START_SHARE * config.trainer.model_timeout_s
    log = placement.log and placement.log.with_name(f"{placement.log.stem}-server.log")
    server = SglangServer(server_settings(config.model, config.rollout, placement), log, start_s)
    # The server also ends responses at the tokens of the model's own configuration.
    own = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code).eos_token_id
    ends = {*eos_token_ids, *(own if isinstance(own, list) else [own])} - {None}
    return SglangEngine(server, config.rollout, ends, placement)


class SglangEngine:
    """A RolloutEngine and a WeightReceiver.

    Log-probabilities are those that Completion describes; none exist after top_p and top_k. Without SGLang's option
    enable_deterministic_inference, the server ignores seeds.
    """

    def __init__(
        self, server: SglangServer, rollout: EngineConfig, eos_token_ids: Collection[int], placement: Placement
    ) -> None:
        self._server = server
        self._places = rollout.max_num_seqs + rollout.max_num_seqs // 4  # as many as the driver sends
        self._stall_s = rollout.stall_s
        self._eos_token_ids = sorted(eos_token_ids)
        self._placement = placement
        self._asleep: set[str] = set()
        self._waiting: deque[_Running] = deque()
        self._sent: dict[int, _Running] = {}
        """The requests that the server has, by number."""
        self._ended: list[_Running] = []
        """Requests that were completed while a weight update waited for the server."""
        self._calls: Calls[HttpAnswer] = Calls()
        self._version = 0
        self._received: tempfile.TemporaryDirectory[str] | None = None
        """The weights of the update in progress."""
        self._files = 0
        self._heard = time.monotonic()
        self._probes: Calls[bool] = Calls()

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine. A request that is too long is refused by the server, in `advance`."""
        self._waiting += [_Running(request) for request in requests]

    def advance(self, slice_s: float, version: int) -> list[tuple[int, Completion]]:
        """See RolloutEngine.

        Raises:
            UserError: the server refused a request.
            SystemExit: the server has ended, does not answer, or has failed.
        """
        self._version = version
        ends_at = time.monotonic() + slice_s
        if not self._sent:
            self._heard = time.monotonic()
        ended, self._ended = self._ended, []
        while self._waiting or self._sent:
            self._send()
            left = ends_at - time.monotonic()
            taken = self._take(min(POLL_S, left))
            if any(request.ended is None for request in taken):
                self._server.give_up("the server ended a request by itself")
            ended += taken
            if left <= 0:
                break
        return [(request.number, request.completion()) for request in ended]

    @property
    def running(self) -> int:
        return len(self._waiting) + len(self._sent) + len(self._ended)

    @property
    def unfinished(self) -> int:
        """Tokens so far, without those that only the server knows: it reports them at the end of a request."""
        return sum(len(request.tokens) for request in (*self._waiting, *self._sent.values()))

    def withdraw(self) -> dict[int, Completion]:
        self._interrupt()
        begun = {request.number: request.completion() for request in self._waiting if request.tokens}
        self._waiting.clear()
        return begun

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all weights at once, from this process. Weights from other processes come by the four calls."""
        self.start_weight_update()
        for bucket in pack(weights, LOCAL_BUCKET_BYTES):
            self.update_weights(bucket)
        self.finish_weight_update()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing: a bucket needs no preparation."""

    def start_weight_update(self) -> None:
        self._interrupt()
        self._wake("weights")
        self._received = own_folder("weights-")
        self._files = 0

    def update_weights(self, update: Bucket) -> None:
        """Write some of the weights, whose memory belongs to the sender until the call returns.

        Raises:
            RunError: they cannot be written, for example to a full disk.
        """
        assert self._received is not None
        self._files += 1
        tensors = dict(unpack(update))
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        types = {name: tensor.dtype for name, tensor in tensors.items()}
        file = Path(self._received.name) / f"model-{self._files:05d}.safetensors"
        with writing(file):
            safetensors_files.write(file, shapes, types, tensors.__getitem__)

    def finish_weight_update(self) -> None:
        """Let the server load what has been written. Its cache is empty: `_interrupt` has flushed it, or `sleep`."""
        assert self._received is not None
        folder, self._received = self._received, None
        with folder as path:
            body = {"model_path": path, "load_format": "safetensors", "flush_cache": False}
            answer = self._server.post("/update_weights_from_disk", body).table()
            if answer.get("success") is not True:
                self._server.give_up(f"/update_weights_from_disk: {answer.get('message')}")

    def sleep(self) -> None:
        """Discard weights and cache, if a trainer needs the memory."""
        if self._placement.sleeps and self._asleep != PARTS:
            self._interrupt()
            self._server.post("/release_memory_occupation", {"tags": sorted(PARTS)})
            self._asleep = set(PARTS)

    def wake(self) -> None:
        self._wake(*PARTS)

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def _wake(self, *parts: str) -> None:
        """Wake parts that are asleep. An update wakes only the weights: the trainer still uses the cache's memory."""
        if waking := sorted(self._asleep.intersection(parts)):
            self._server.post("/resume_memory_occupation", {"tags": waking})
            self._asleep.difference_update(waking)

    def _send(self) -> None:
        while self._waiting and len(self._sent) < self._places:
            request = self._waiting.popleft()
            request.version = self._version
            self._sent[request.number] = request
            body = request_body(request.prompt(), request.rest(), request.request.seed, self._eos_token_ids)
            self._calls.start(request.number, partial(self._server.client.post, "/generate", body))

    def _take(self, timeout_s: float) -> list[_Running]:
        """Return the requests that the server has answered, after a wait of at most this long for the first."""
        try:
            answers = self._calls.take(timeout_s)
        except UnreachableError as error:
            self._server.lost("/generate", error)
        self._server.check_is_alive()
        if answers:
            self._heard = time.monotonic()
            heart.beat()
        else:
            self._probe()
        ends = self._eos_token_ids
        return [self._sent.pop(number).answered(self._checked(answer), ends) for number, answer in answers]

    def _checked(self, answer: HttpAnswer) -> Mapping[str, Any]:
        """Return what the server tells about a response."""
        if answer.status == 400:
            raise UserError(
                f"rollout.name=sglang: the server refused a request ({answer.reason()}): if it is too long, raise "
                "context_length in rollout.engine_kwargs, or lower data.max_prompt_length or data.max_response_length"
            )
        told = answer.table().get("meta_info")
        if answer.status != 200 or not isinstance(told, dict):
            self._server.give_up(f"/generate: the server answered {answer.reason()}")
        return told

    def _probe(self) -> None:
        """Give up if the server neither completes a response nor shows that it generates, for rollout.stall_s."""
        silent_s = time.monotonic() - self._heard
        for _, healthy in self._probes.take(0):
            if healthy:
                self._heard = time.monotonic()
            elif silent_s > self._stall_s:
                self._server.give_up(f"no response, and no answer to /health, for {silent_s:.0f} s (rollout.stall_s)")
        if silent_s > PROBE_S and not len(self._probes):
            self._probes.start(0, self._server.is_healthy)

    def _interrupt(self) -> None:
        """End the server's requests, keep their tokens, and empty its cache, unless that sleeps."""
        deadline = time.monotonic() + FLUSH_S
        while self._sent:
            if time.monotonic() > deadline:
                self._server.give_up(f"/abort_request: {len(self._sent)} requests still run after {FLUSH_S:.0f} s")
            self._server.post("/abort_request", {"rid": "", "abort_all": True})
            taken = self._take(ABORT_S)
            self._ended += [request for request in taken if request.ended is not None]
            # In front of the others, which are newer.
            self._waiting.extendleft(request for request in reversed(taken) if request.ended is None)
        if "kv_cache" not in self._asleep:
            self._flush()

    def _flush(self) -> None:
        """Empty the cache. The server refuses this until it has put its last request away."""
        deadline = time.monotonic() + FLUSH_S
        while True:
            try:
                answer = self._server.client.post("/flush_cache", {}, FLUSH_S)
            except UnreachableError as error:
                self._server.lost("/flush_cache", error)
            if answer.status == 200:
                return
            if time.monotonic() > deadline:
                self._server.give_up(f"/flush_cache: the server answered {answer.reason()}")
            time.sleep(ABORT_S)


@dataclass
class _Running:
    """A request that is not complete."""

    request: Request
    version: int = 0
    """Of the weights that the server had when it was sent last."""
    tokens: list[int] = field(default_factory=list)
    """Those so far."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ended: str | None = None
    """SGLang's reason for the end, stop or length; None if it was interrupted."""

    @property
    def number(self) -> int:
        return self.request.number

    def prompt(self) -> list[int]:
        """Return what the server has to continue."""
        prompt: list[int] = self.request.prompt.tolist()
        return prompt + self.tokens

    def rest(self) -> Sampling:
        """Return how it has to continue."""
        sampling = self.request.sampling
        left = sampling.max_new_tokens - len(self.tokens)
        return Sampling(left, sampling.temperature, sampling.top_p, sampling.top_k)

    def answered(self, told: Mapping[str, Any], ends: Collection[int]) -> _Running:
        """Take the tokens of an answer, and return self.

        Args:
            ends: the tokens that end a response. An interrupted request may draw one more token, and the server then
                reports the interruption although this token ends the response.

        Raises:
            UserError: the server has no room for a response of the requested length.
        """
        steps = told.get("output_token_logprobs") or []
        self.tokens += [int(token) for _, token, *_ in steps]
        self.logprobs += [float(logprob) for logprob, *_ in steps]
        if steps:
            self.spans.append(Span(self.version, len(steps)))
        reason = (told.get("finish_reason") or {}).get("type")
        wanted = self.request.sampling.max_new_tokens
        if reason == "length" and len(self.tokens) < wanted:
            raise UserError(
                f"rollout.name=sglang: a response of up to {wanted} tokens to a prompt of {len(self.request.prompt)} "
                f"was requested, and the server ended it after {len(self.tokens)}: raise context_length in "
                "rollout.engine_kwargs, or lower data.max_response_length"
            )
        if reason in ("stop", "length"):
            self.ended = reason
        elif steps and self.tokens[-1] in ends:  # it was complete when it was interrupted
            self.ended = "stop"
        elif len(self.tokens) >= wanted:
            self.ended = "length"
        return self

    def completion(self) -> Completion:
        """Return the complete response."""
        return Completion(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            self.ended == "stop",
            joined(self.spans),
        )


def request_body(prompt: list[int], sampling: Sampling, seed: int, stop_token_ids: list[int]) -> dict[str, Any]:
    """Return the body of /generate. The server also ends at the tokens of the model's own configuration."""
    return {
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "sampling_seed": seed,
            "stop_token_ids": stop_token_ids,
        },
        "return_logprob": True,
        "stream": False,
    }


def server_settings(model: ModelSource, rollout: EngineConfig, placement: Placement) -> dict[str, Any]:
    """Return SGLang's arguments, as its file has them. rollout.engine_kwargs take precedence over all others."""
    settings: dict[str, Any] = {
        "model-path": model.path,
        "trust-remote-code": model.trust_remote_code,
        "skip-tokenizer-init": True,
        "dtype": engine_dtype(rollout, placement.device),
        "device": placement.device,
        "max-running-requests": rollout.max_num_seqs,
    }
    if placement.device != "cpu":
        memory = rollout.gpu_memory_utilization or (SHARED_GPU if placement.gpu_share < 1 else None)
        settings |= {"mem-fraction-static": memory} if memory else {}
        settings |= {"enable-memory-saver": placement.sleeps}
    own = {name.replace("_", "-"): value for name, value in rollout.engine_kwargs.items()}
    return {name: value for name, value in (settings | own).items() if value is not None}
