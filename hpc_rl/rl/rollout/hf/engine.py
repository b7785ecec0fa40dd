"""The rollout engine `hf`: generation with an unchanged Hugging Face model, in the process that holds it.

Nothing is padded: prompts are computed packed, sequences of different lengths are adjacent in the cache, and a sequence
that ends leaves the batch at once, so that a waiting one takes its place (continuous batching: Yu et al., Orca,
https://www.usenix.org/conference/osdi22/presentation/yu). If the weights change, the sequences of the batch continue
with the new ones (partial rollouts: Fu et al., AReaL, https://arxiv.org/abs/2505.24298).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hpc_rl.config.rl.rollout import EngineJob, engine_dtype, room
from hpc_rl.errors import UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.rollout.engine import Completion, Placement, Request
from hpc_rl.rl.rollout.hf.batch import RunningBatch
from hpc_rl.rl.rollout.hf.kv_cache import KVCache
from hpc_rl.training.models.causal_lm import CausalLM, evaluating, load_model
from hpc_rl.training.models.loading import weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFILL_SHARE = 8
"""Waiting requests enter when one row in this many is free, because small prefills are slow."""


def load(config: EngineJob, eos_token_ids: Collection[int], placement: Placement, policy: CausalLM | None) -> HfEngine:
    """Load the engine on the policy's own module, or on a copy; see `hpc_rl.rl.rollout.engine.Loader`."""
    if policy is None:
        dtype = engine_dtype(config.rollout, placement.device)
        # Adapters arrive merged into the weights.
        policy = load_model(config.model.in_dtype(dtype), room(config), config.trainer.packing)
        policy.requires_grad_(False).eval().to(torch.device(placement.device))
    return HfEngine(policy.hf, eos_token_ids, config.rollout.max_num_seqs)


class HfEngine:
    """A RolloutEngine. `sleep` leaves the model on its device."""

    def __init__(self, hf: PreTrainedModel, eos_token_ids: Collection[int], max_num_seqs: int = 256) -> None:
        """
        Args:
            hf: loaded by training.model.load_model, not sharded. If it is the module that is being trained,
                `load_weights` is not needed.
            eos_token_ids: tokens that end a response.
            max_num_seqs: most sequences that are generated at a time.
        """
        self.hf = hf
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._batch: RunningBatch | None = None
        self._cache: KVCache | None = None
        self._columns = self._steps = 0
        """What the longest of the requests needs since the engine last had none."""

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests behind those that wait.

        Raises:
            UserError: a prompt and its max_new_tokens together exceed the model's positions. No request is added.
        """
        limit = getattr(self.hf.config.get_text_config(), "max_position_embeddings", None)
        for request in requests:
            prompt, response = len(request.prompt), request.sampling.max_new_tokens
            if limit is not None and prompt + response > limit:
                raise UserError(
                    f"a prompt of {prompt} tokens and a response of {response} exceed the model's {limit} positions: "
                    "lower data.max_prompt_length or data.max_response_length"
                )
        if not self.running:
            self._columns = self._steps = 0
        for request in requests:
            self._columns = max(self._columns, len(request.prompt) + request.sampling.max_new_tokens)
            self._steps = max(self._steps, request.sampling.max_new_tokens)
        self._waiting += requests

    def advance(self, slice_s: float, version: int) -> list[tuple[int, Completion]]:
        """Generate for a slice of time, but at least one token of each running sequence."""
        end = time.monotonic() + slice_s
        with torch.inference_mode(), evaluating(self.hf):
            if self._batch:
                self._batch.change_weights(version)
            over = False
            while self.running and not over:
                batch = self._admit(version)
                batch.step()
                over = time.monotonic() >= end
                batch.retire(at_once=over)
                heart.beat()
            found = self._batch.collect() if self._batch else []
        if not self.running:
            self._batch = None
        return found

    @property
    def running(self) -> int:
        return len(self._waiting) + (self._batch.live if self._batch else 0)

    @property
    def unfinished(self) -> int:
        return self._batch.unfinished if self._batch else 0

    def withdraw(self) -> dict[int, Completion]:
        begun = dict(self._batch.begun()) if self._batch else {}
        self._waiting.clear()
        self._batch = None
        return begun

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into the model's parameters, by the names of named_parameters(), tied ones once.

        Raises:
            ValueError: the model has no weight of that name and shape.
        """
        own = weights_of(self.hf)
        with torch.no_grad():
            for name, weight in weights:
                if name not in own or own[name].shape != weight.shape:
                    raise ValueError(f"the model has no weight {name} of shape {tuple(weight.shape)}")
                own[name].copy_(weight)

    def sleep(self) -> None:
        """Free the cache. If responses are incomplete, their batch keeps it."""
        self._cache = None

    def wake(self) -> None:
        """Do nothing: `advance` allocates what it needs."""

    def close(self) -> None:
        """Do nothing: the engine has no processes."""

    def _admit(self, version: int) -> RunningBatch:
        """Return the batch, with waiting requests in it if there is room."""
        live = self._batch.live if self._batch else 0
        room = min(self.max_num_seqs - live, len(self._waiting))
        if self._batch and (not room or (self.max_num_seqs - live) * REFILL_SHARE < self.max_num_seqs):
            return self._batch
        if self._batch is None:
            cache = self._cache_of(min(self.max_num_seqs, self.running), self._columns)
            self._batch = RunningBatch(self.hf, cache, self.eos_token_ids, self.max_num_seqs, version)
        self._batch.reserve(live + room, self._columns, self._steps)
        self._batch.admit([self._waiting.popleft() for _ in range(room)])
        return self._batch

    def _cache_of(self, rows: int, columns: int) -> KVCache:
        """Return the last batch's cache if it is large enough, otherwise a new one. Its contents are overwritten."""
        if self._cache is None or self._cache.rows < rows or self._cache.columns < columns:
            self._cache = None  # frees its memory before the new one is allocated
            self._cache = KVCache(rows, columns)
        return self._cache
