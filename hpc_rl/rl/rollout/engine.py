"""The interface of a rollout engine, and `load_engine`, which loads the one that a configuration selects.

`hpc_rl.config.engines.ENGINES` lists the engines. Each is a module with a function `load` (see `Loader`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.rollout import EngineJob, engine_spec
from hpc_rl.data.chat import chat_template, end_of_turn
from hpc_rl.training.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.training.models.causal_lm import CausalLM


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


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: NDArray[np.int32]
    """[R], R >= 1. If the response ended by itself, the last one is an end-of-sequence token."""
    logprobs: NDArray[np.float32]
    """[R], natural logarithms under softmax(logits / temperature), at temperature 1 if decoding was greedy; see also
    Sampling.truncated_logprobs."""
    finished: bool
    """Whether the response ended by itself; otherwise it was cut off at max_new_tokens."""


class RolloutEngine(Protocol):
    """Generate with a model whose weights change only in `load_weights`.

    An engine may have the four calls of `hpc_rl.rl.weights.base.WeightReceiver` in addition. It then receives weights
    from other processes itself; for any other engine, `BucketReceiver` passes each bucket to `load_weights`.
    """

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """Return one completion for each prompt, in order.

        Args:
            prompts: token ids [P] of each. Equal prompts are adjacent, so that an engine can compute them once.
            seeds: one per prompt. A completion depends only on its prompt, its seed and the weights, not on the other
                prompts (up to rounding).
            sampling: how tokens are drawn.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy new weights, by their Hugging Face names, into the model. A call may bring only some of the weights."""
        ...

    def sleep(self) -> None:
        """Release as much of the device's memory as possible until `wake`.

        The weights may be lost: an engine that has slept receives new ones before it generates again.
        """
        ...

    def wake(self) -> None:
        """Take back the memory that `sleep` released."""
        ...

    def close(self) -> None:
        """End the processes that the engine has started."""
        ...


@runtime_checkable
class BlockEngine(Protocol):
    """Generate blocks of responses one after the other. The next block begins while the last responses of one are still
    being generated, so that the engine never waits."""

    def add_block(self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling) -> None:
        """Add a block behind those that have been added; see `RolloutEngine.generate`."""
        ...

    def next_block(self) -> list[Completion]:
        """Generate until the oldest block is complete, and return its completions in order."""
        ...


class SeparateBlocks:
    """A BlockEngine of an engine that has only `generate`: a block begins when the one before it is complete."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._blocks: deque[tuple[Sequence[NDArray[np.int32]], Sequence[int], Sampling]] = deque()

    def add_block(self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling) -> None:
        """See BlockEngine."""
        self._blocks.append((prompts, seeds, sampling))

    def next_block(self) -> list[Completion]:
        """See BlockEngine."""
        return self._engine.generate(*self._blocks.popleft())


def blocks_of(engine: RolloutEngine) -> BlockEngine:
    """Return the engine itself if it overlaps blocks, otherwise one that does not."""
    return engine if isinstance(engine, BlockEngine) else SeparateBlocks(engine)


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
        ...


def load_engine(config: EngineJob, placement: Placement, policy: CausalLM | None = None) -> RolloutEngine:
    """Load the engine of `rollout.name` in this process; see `Loader`."""
    load: Loader = importlib.import_module(engine_spec(config).module).load
    return load(config, eos_token_ids(config), placement, policy)


def eos_token_ids(config: EngineJob) -> set[int]:
    """Return the tokens that end a response; see `ending_token_ids`."""
    tokenizer = load_tokenizer(config.model)
    return ending_token_ids(tokenizer, chat_template(tokenizer, config.data), config.model.path)


def ending_token_ids(tokenizer: PreTrainedTokenizerBase, template: str, path: str) -> set[int]:
    """Return the tokens that end a response.

    They are the tokenizer's end-of-sequence token, the token that ends a turn of the chat template, and those of the
    model's generation configuration, if it has one.
    """
    from transformers import GenerationConfig

    found = [tokenizer.eos_token_id, end_of_turn(tokenizer, template)]
    with contextlib.suppress(OSError):
        listed = GenerationConfig.from_pretrained(path).eos_token_id
        found += listed if isinstance(listed, list) else [listed]
    return {token for token in found if token is not None}
