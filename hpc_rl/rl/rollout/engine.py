"""The interface of a rollout engine, and `load_engine`, which loads the one that a configuration selects.

`hpc_rl.config.rl.engines.ENGINES` lists the engines. Each is a module with a function `load` (see `Loader`).
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.rl.rollout import EngineJob, engine_spec
from hpc_rl.data.templates.chat import chat_template, ending_token_ids
from hpc_rl.training.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from hpc_rl.training.models.causal_lm import CausalLM


SEEDS = 2**62
"""Seeds are below it."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token at every step."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    truncated_logprobs: bool = False
    """Whether log-probabilities are those of the distribution after top_k and top_p, from which tokens are drawn."""


class Span(NamedTuple):
    """Neighbouring tokens of a response that were sampled with the same weights."""

    version: int
    """Number of weight updates before them, as `RolloutEngine.advance` was told."""
    tokens: int


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbouring spans of the same version: a sync need not change the number of updates."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = Span(span.version, found.pop().tokens + span.tokens)
        found.append(span)
    return tuple(found)


@dataclass(frozen=True)
class Request:
    """One response that an engine has to generate."""

    number: int
    """Which request of the run this is. The engine returns it with the response."""
    prompt: NDArray[np.int32]
    """Token ids, [P]."""
    seed: int
    """A response depends only on its prompt, its seed and the weights, not on other requests (up to rounding)."""
    sampling: Sampling

    def after(self, begun: Completion) -> Request:
        """Return the request for the rest of a response. Its seed is another one: each step has a number of its own."""
        left = replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - len(begun.token_ids))
        prompt = np.concatenate([self.prompt, begun.token_ids])
        return Request(self.number, prompt, (self.seed + len(begun.token_ids)) % SEEDS, left)


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: NDArray[np.int32]
    """[R], R >= 1, with observations. If the response ended by itself, the last one is an end-of-sequence token."""
    logprobs: NDArray[np.float32]
    """[R], natural logarithms under softmax(logits / temperature), at temperature 1 if decoding was greedy, of the
    weights that sampled the token; see also Sampling.truncated_logprobs. NaN if the engine does not get them."""
    finished: bool
    """Whether the response ended by itself; otherwise it was cut off at max_new_tokens."""
    spans: tuple[Span, ...] = ()
    """Which weights sampled which tokens, in order; the tokens of all spans are R."""
    mask: NDArray[np.bool_] | None = None
    """[R], whether the model sampled the token, at least one of them; the others are observations, whose logprobs are 0
    and never used. None: it sampled all."""
    prompt: NDArray[np.int32] | None = None
    """[P], what it answers, if this is not the prompt that was requested: an environment may begin a conversation."""

    @property
    def sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return len(self.token_ids) if self.mask is None else int(self.mask.sum())

    def then(self, rest: Completion) -> Completion:
        """Return the response that another engine has continued. Neither part has observations."""
        return Completion(
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            rest.finished,
            joined((*self.spans, *rest.spans)),
        )


class RolloutEngine(Protocol):
    """Generate with a model whose weights change only in `load_weights`.

    An engine may have the four calls of `hpc_rl.rl.weights.base.WeightReceiver` in addition. It then receives weights
    from other processes itself; for any other engine, `BucketReceiver` passes each bucket to `load_weights`.
    """

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests behind those that wait. They enter as soon as there is room.

        Raises:
            UserError: the engine cannot generate a response of this length.
        """

    def advance(self, slice_s: float, version: int) -> list[tuple[int, Completion]]:
        """Generate for this many seconds, or until no request is left, and return the responses that are complete, each
        with the number of its request.

        Args:
            version: number of weight updates so far. If it has changed, the weights may have: responses that are not
                complete continue with the new ones, as if these had computed prompt and response from the beginning.
        """

    @property
    def running(self) -> int:
        """Number of requests that are not complete."""

    @property
    def unfinished(self) -> int:
        """Tokens so far of the requests that are not complete."""

    def withdraw(self) -> dict[int, Completion]:
        """Forget all requests that are not complete. Return the tokens so far of those that have any, by number.

        Other requests may be complete after it, and are what `advance` returns next.
        """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy new weights, by their Hugging Face names, into the model. A call may bring only some of the weights."""

    def sleep(self) -> None:
        """Release as much of the device's memory as possible until `wake`.

        The weights may be lost: an engine that has slept receives new ones before it generates again.
        """

    def wake(self) -> None:
        """Take back the memory that `sleep` released."""

    def close(self) -> None:
        """End the processes that the engine has started."""


class SliceResult(NamedTuple):
    """What an engine has done in a call."""

    completed: list[tuple[int, Completion]]
    """Responses, each with the number of its request."""
    busy_s: float
    """Seconds that it has generated."""
    unfinished: int = 0
    """Tokens so far of the requests that are not complete. They are lost if the engine is."""
    leaves: bool = False
    """Whether its node is about to leave the run."""
    begun: dict[int, Completion] | None = None
    """What it has given back because of that: all requests, and the tokens so far of those that have any, by number."""


def run_slice(engine: RolloutEngine, requests: Sequence[Request], slice_s: float, version: int) -> SliceResult:
    """Add requests to an engine and let it generate; see RolloutEngine. This is one call of `RequestQueue`."""
    engine.add(requests)
    began = time.perf_counter()
    completed = engine.advance(slice_s, version) if engine.running else []
    return SliceResult(completed, time.perf_counter() - began, engine.unfinished)


def complete(
    engine: RolloutEngine, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
) -> list[Completion]:
    """Generate one response to each prompt with an engine that has no other requests; return them in order."""
    numbers = range(len(prompts))
    engine.add([Request(*each, sampling) for each in zip(numbers, prompts, seeds, strict=True)])
    found: dict[int, Completion] = {}
    while len(found) < len(prompts):
        found.update(engine.advance(math.inf, 0))
    return [found[number] for number in numbers]


@dataclass(frozen=True)
class Placement:
    """Where an engine runs, and how its weights arrive."""

    device: str
    """torch's name of the device, such as cuda or cpu."""
    transfer: str = "host"
    """Name in `hpc_rl.rl.weights.transfers.WEIGHT_TRANSFERS`; unused by an engine in the policy's process."""
    sleeps: bool = False
    """Whether the engine releases GPU memory in `sleep`, for a trainer on the same GPU."""
    bundles: tuple[int, ...] = ()
    """On GPUs with tensor parallelism: the bundles of the actor's placement group that the engine's processes use."""
    gpu_share: float = 1.0
    """Share of its GPU that each of these processes uses."""
    adapters: Mapping[str, Any] | None = None
    """Contents of adapter_config.json if the engine receives the policy's adapters only; None for merged weights."""
    log: Path | None = None
    """The file that the engine's process logs to. Other processes that the engine starts have logs beside it; None:
    they log to where the engine does."""


class Loader(Protocol):
    """The function `load` of an engine's module."""

    def __call__(
        self, config: EngineJob, eos_token_ids: Collection[int], placement: Placement, policy: CausalLM | None
    ) -> RolloutEngine:
        """Load the engine in this process.

        Args:
            config: the run's configuration.
            eos_token_ids: tokens that end a response, the same for every engine.
            placement: where the engine runs.
            policy: the unsharded module that is being trained in this process: generate with it, because no weights
                will be loaded. None: load a copy of the model, which receives weights through `load_weights`.

        Raises:
            UserError: a package is missing, or the engine refuses the configuration.
        """


def load_engine(config: EngineJob, placement: Placement, policy: CausalLM | None = None) -> RolloutEngine:
    """Load the engine of `rollout.name` in this process; see `Loader`."""
    load: Loader = importlib.import_module(engine_spec(config).module).load
    return load(config, eos_token_ids(config), placement, policy)


def eos_token_ids(config: EngineJob) -> set[int]:
    """Return the tokens that end a response; see `ending_token_ids`."""
    tokenizer = load_tokenizer(config.model)
    return set(ending_token_ids(tokenizer, chat_template(tokenizer, config.data), config.model.path))
