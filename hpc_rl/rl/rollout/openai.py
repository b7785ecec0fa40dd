"""The rollout engine `openai`: a client of a server that others operate, with OpenAI's API.

Each response is one request to /completions (https://platform.openai.com/docs/api-reference/completions), whose prompt
is a list of token ids, so that the server renders no chat template. `return_token_ids` is an extension of some servers
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server/); of others, the text is tokenized.

The weights never change, so `submit generate` and `eval` can use this engine, and `submit ppo` cannot.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.rl.generate import GenerateConfig, GenerateRolloutConfig
from hpc_rl.config.rl.rollout import EngineJob
from hpc_rl.errors import RunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Span
from hpc_rl.rl.rollout.http_calls import SHOWN_CHARS, Calls, HttpAnswer, HttpClient, UnreachableError
from hpc_rl.training.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.training.models.causal_lm import CausalLM

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before the first repetition of a request; each further one is twice as long, up to the second number."""
POLL_S = 0.5
PASSING = (408, 425, 429)
"""Errors of a client that may pass (RFC 9110 and 6585), besides all errors of a server, 5xx."""
_REFUSED = {
    400: "the server may not take token ids as a prompt, or has no room for prompt and response: lower "
    "data.max_prompt_length or data.max_response_length, or use another server",
    401: "check the key in the environment variable that rollout.openai.key_variable names",
    403: "check the key in the environment variable that rollout.openai.key_variable names, and what it permits",
    **dict.fromkeys((301, 302, 303, 307, 308), "set rollout.openai.base_url to the server's own address"),
    404: "check rollout.openai.base_url, which ends with the version of the API (/v1), and rollout.openai.model",
}
_OTHERWISE = "check rollout.openai.base_url and the server"


def load(
    config: EngineJob, eos_token_ids: Collection[int], placement: Placement, policy: CausalLM | None
) -> OpenaiEngine:
    """Return the client; see `hpc_rl.rl.rollout.engine.Loader`. The model's folder is needed for its tokenizer only.

    Raises:
        UserError: the variable with the key is not set, or is no key.
    """
    assert isinstance(config, GenerateConfig)
    options = config.rollout.openai
    assert options.base_url is not None
    key = None
    if options.key_variable is not None:
        key = os.environ.get(options.key_variable, "").strip()
        if not key:
            raise UserError(
                f"rollout.openai.key_variable is {options.key_variable}, and the job has no such environment variable: "
                f"`export {options.key_variable}=...` before you submit, or set it in slurm.setup"
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"rollout.openai.key_variable is {options.key_variable}, and its value has characters that no key has, "
                "such as line ends: export it again"
            )
    client = HttpClient(options.base_url, key)
    return OpenaiEngine(client, config.rollout, options.model or config.model.path, load_tokenizer(config.model))


class OpenaiEngine:
    """A RolloutEngine without weights of its own.

    Log-probabilities are those that the server reports; NaN if it reports none.

    Args:
        client: of the address to which /completions is added.
        model: its name on the server.
        tokenizer: the model's.
    """

    def __init__(
        self, client: HttpClient, rollout: GenerateRolloutConfig, model: str, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._client = client
        self._rollout = rollout
        self._model = model
        self._tokenizer = tokenizer
        self._waiting: deque[Request] = deque()
        self._calls: Calls[Completion] = Calls()
        self._closed = threading.Event()

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine. A request that is too long is refused by the server, in `advance`."""
        self._waiting += requests

    def advance(self, slice_s: float, version: int) -> list[tuple[int, Completion]]:
        """See RolloutEngine.

        Raises:
            UserError: the server refused a request.
            RunError: it did not answer, or its answer was no response.
        """
        ends_at = time.monotonic() + slice_s
        completed: list[tuple[int, Completion]] = []
        while self.running:
            while self._waiting and len(self._calls) < self._rollout.max_num_seqs:
                request = self._waiting.popleft()
                self._calls.start(request.number, partial(self._respond, request, version))
            left = ends_at - time.monotonic()
            if found := self._calls.take(min(POLL_S, left)):
                heart.beat()
            completed += found
            if left <= 0:
                break
        return completed

    @property
    def running(self) -> int:
        return len(self._waiting) + len(self._calls)

    @property
    def unfinished(self) -> int:
        """0: the server reports tokens at the end of a response."""
        return 0

    def withdraw(self) -> dict[int, Completion]:
        """Refuse: no job lends an engine that is a server of others."""
        raise UserError("rollout.name=openai: requests cannot be taken back from the server")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse: the server belongs to others."""
        raise UserError("rollout.name=openai: new weights arrived, and the server does not take any")

    def sleep(self) -> None:
        """Do nothing: the engine uses no device."""

    def wake(self) -> None:
        """Do nothing: the engine uses no device."""

    def close(self) -> None:
        """Repeat no request any more."""
        self._closed.set()

    def _respond(self, request: Request, version: int) -> Completion:
        """Return the response to a request, which is repeated if an error may pass. This runs in a thread."""
        body, options = request_body(request, self._model), self._rollout.openai
        found = ""
        for attempt in range(options.retries + 1):
            pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
            try:
                answer = self._client.post("/completions", body, options.timeout_s)
            except UnreachableError as error:
                found = f"there was no answer ({error})"
            else:
                if answer.status == 200:
                    return self._completion(answer, version)
                found = f"the server answered {answer.reason()}"
                if answer.status < 500 and answer.status not in PASSING:
                    advice = _REFUSED.get(answer.status, _OTHERWISE)
                    raise UserError(
                        f"rollout.name=openai: {self._client.url} was asked for a response: {found}; {advice}"
                    )
                pause_s = pause_of(answer.retry_after, pause_s)
            if attempt < options.retries and self._closed.wait(pause_s):
                break
        raise RunError(
            f"rollout.name=openai: {self._client.url} was asked {options.retries + 1} times for a response: at last "
            f"{found}; check the server, lower rollout.max_num_seqs, or raise rollout.openai.retries or timeout_s, and "
            "submit the run again: it keeps the blocks that are finished"
        )

    def _completion(self, answer: HttpAnswer, version: int) -> Completion:
        """Return the response in an answer.

        Raises:
            RunError: there is none.
            UserError: log-probabilities are to be written, and there are none.
        """
        choices = answer.table().get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        finished = choice.get("finish_reason") == "stop"
        tokens = self._tokens_of(choice, finished)
        end = self._tokenizer.eos_token_id
        is_empty = choice.get("text") == "" or choice.get("token_ids") == []
        if not tokens and is_empty and choice.get("finish_reason") is not None and isinstance(end, int):
            tokens = [end]  # a response has a token
        if not tokens:
            raise RunError(
                f"rollout.name=openai: {self._client.url} was asked for a response, and its answer has none: "
                f"{answer.body[:SHOWN_CHARS]!r}; check that rollout.openai.base_url is a server with OpenAI's API"
            )
        logprobs = logprobs_of(choice, len(tokens))
        if self._rollout.logprobs and np.isnan(logprobs).any():
            raise UserError(
                f"rollout.logprobs=true: {self._client.url} reports no log-probability for each token of a response: "
                "remove rollout.logprobs, or use a server that reports them, such as vLLM's"
            )
        return Completion(np.array(tokens, np.int32), logprobs, finished, (Span(version, len(tokens)),))

    def _tokens_of(self, choice: Mapping[str, Any], finished: bool) -> list[int]:
        ids, text = choice.get("token_ids"), choice.get("text")
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return ids
        if not isinstance(text, str):
            return []
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        end = self._tokenizer.eos_token_id
        return [*tokens, end] if finished and text and isinstance(end, int) else tokens


def request_body(request: Request, model: str) -> dict[str, Any]:
    """Return the body of /completions."""
    sampling = request.sampling
    return {
        "model": model,
        "prompt": request.prompt.tolist(),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        # Extensions, such as vLLM's. What is left out would be as in the model's generation_config.json.
        "top_k": sampling.top_k or -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "seed": request.seed,
        "logprobs": 1,
        "return_token_ids": True,
    }


def logprobs_of(choice: Mapping[str, Any], tokens: int) -> NDArray[np.float32]:
    """Return the log-probability of each token, or NaN if the server does not report exactly one for each."""
    told = choice.get("logprobs")
    found = told.get("token_logprobs") if isinstance(told, dict) else None
    if isinstance(found, list) and len(found) == tokens and all(isinstance(each, float | int) for each in found):
        return np.array(found, np.float32)
    return np.full(tokens, np.nan, np.float32)


def pause_of(retry_after: str | None, otherwise_s: float) -> float:
    """Return the seconds of a header Retry-After, at most LONGEST_PAUSE_S; another number if it has none."""
    if retry_after is None or not retry_after.strip().isdigit():
        return otherwise_s
    return min(float(retry_after), LONGEST_PAUSE_S)
