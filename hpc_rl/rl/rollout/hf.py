"""The rollout engine `hf`: generation with an unchanged Hugging Face model, in the process that holds it.

Nothing is padded: prompts are computed packed, sequences of different lengths are adjacent in the cache, and a sequence
that ends leaves the batch at once, so that a waiting one takes its place (continuous batching: Yu et al., Orca,
https://www.usenix.org/conference/osdi22/presentation/yu).

Shape suffixes: N sequences of one call, B sequences in the current batch, S steps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hpc_rl.config.rollout import EngineJob, engine_dtype
from hpc_rl.errors import UserError
from hpc_rl.host.heartbeat import heart
from hpc_rl.rl.rollout.engine import Completion, Placement, Sampling
from hpc_rl.rl.rollout.kv_cache import Decode, KVCache, Prefill, PrefillDone
from hpc_rl.rl.rollout.sampling import TokenSampler, uniforms
from hpc_rl.training.models.causal_lm import CausalLM, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Most prompt tokens of one forward pass (a longer prompt has its own pass). Larger passes are not faster."""
STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 8}
"""Steps between two checks for sequences that have ended. A check makes the host wait for the GPU."""
REFILL_SHARE = 8
"""Waiting sequences enter when one row in this many is free, because small prefills are slow."""


def load(config: EngineJob, eos_token_ids: Collection[int], placement: Placement, policy: CausalLM | None) -> HfEngine:
    """Load the engine on the policy's own module, or on a copy; see `hpc_rl.rl.rollout.engine.Loader`."""
    if policy is None:
        dtype = engine_dtype(config.rollout, placement.device)
        # Adapters arrive merged into the weights.
        policy = load_model(config.model.in_dtype(dtype))
        policy.requires_grad_(False).eval().to(torch.device(placement.device))
    return HfEngine(policy.hf, eos_token_ids, config.rollout.max_num_seqs)


class HfEngine:
    """A RolloutEngine. `sleep` frees the cache, and leaves the model on its device."""

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
        self._cache: KVCache | None = None

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """See RolloutEngine.

        Raises:
            UserError: the longest prompt and max_new_tokens together exceed the model's positions.
        """
        if not prompts:
            return []
        columns = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        limit = getattr(self.hf.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and columns > limit:
            raise UserError(
                f"a prompt of {columns - sampling.max_new_tokens} tokens and a response of {sampling.max_new_tokens} "
                f"exceed the model's {limit} positions: lower data.max_prompt_length or data.max_response_length"
            )
        cache = self._cache_of(min(self.max_num_seqs, len(prompts)), columns)
        with torch.inference_mode(), evaluating(self.hf):
            generation = _Generation(self.hf, cache, self.eos_token_ids, prompts, seeds, sampling)
            while generation.admit():
                generation.step()
                generation.retire()
                heart.beat()
            return generation.completions()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into the model's parameters, by the names of named_parameters(), tied ones once.

        Raises:
            ValueError: the model has no parameter of that name and shape.
        """
        parameters = dict(self.hf.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                if name not in parameters or parameters[name].shape != weight.shape:
                    raise ValueError(f"the model has no parameter {name} of shape {tuple(weight.shape)}")
                parameters[name].copy_(weight)

    def sleep(self) -> None:
        self._cache = None

    def wake(self) -> None:
        """Do nothing: the next call of `generate` allocates what it needs."""

    def close(self) -> None:
        """Do nothing: the engine has no processes."""

    def _cache_of(self, rows: int, columns: int) -> KVCache:
        """Return the last call's cache if it is large enough, otherwise a new one. Its contents are overwritten."""
        if self._cache is None or self._cache.rows < rows or self._cache.columns < columns:
            self._cache = None  # frees its memory before the new one is allocated
            self._cache = KVCache(rows, columns)
        return self._cache


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch off dropout; restore the mode of every submodule afterwards."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class _Generation:
    """One call of `generate`.

    The batch is the first `live` rows, which are also rows of the cache. The state that steps need is on the device;
    the host counts lengths itself, since each step adds one token to each sequence.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        cache: KVCache,
        eos_token_ids: Collection[int],
        prompts: Sequence[NDArray[np.int32]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> None:
        self.hf = hf
        self.cache = cache
        self.prompts = prompts
        self.sampling = sampling
        weight_VH = hf.get_output_embeddings().weight
        self.device = device = weight_VH.device
        self.last_layer = hf.config.get_text_config().num_hidden_layers - 1
        self.rows = min(cache.rows, len(prompts))
        self.waiting = list(range(len(prompts)))[::-1]
        self.sampler = TokenSampler(weight_VH, self.rows, sampling)

        self.live = 0
        self.sequence_B = np.zeros(self.rows, np.int64)
        self.length_B = np.zeros(self.rows, np.int64)
        """Tokens of each row in the cache."""
        self.step_B = np.zeros(self.rows, np.int64)
        self.steps = 0

        self.token_B = torch.zeros(self.rows, dtype=torch.int64, device=device)
        """The token of each row that enters the model next."""
        self.position_B = torch.zeros_like(self.token_B)
        self.output_B = torch.zeros_like(self.token_B)
        """Where each row's next token is written, in the concatenated outputs of all sequences."""
        self.ended_B = torch.zeros_like(self.token_B, dtype=torch.bool)

        size = len(prompts) * sampling.max_new_tokens
        self.uniforms = torch.from_numpy(uniforms(seeds, sampling.max_new_tokens)).to(device).view(-1)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(size, dtype=torch.float32, device=device)
        ends_V = np.zeros(weight_VH.shape[0], bool)
        ends_V[[token for token in eos_token_ids if token < len(ends_V)]] = True
        self.ends_V = torch.from_numpy(ends_V).to(device)

    def admit(self) -> bool:
        """Fill free rows. A new sequence enters with its prompt in the cache, except for the last token.

        Returns:
            whether any sequence is left to generate.
        """
        room = self.rows - self.live
        if not self.waiting or (self.live and room * REFILL_SHARE < self.rows):
            return self.live > 0
        first = self.live
        for row in range(first, first + min(room, len(self.waiting))):
            sequence = self.waiting.pop()
            self.sequence_B[row] = sequence
            self.length_B[row] = len(self.prompts[sequence]) - 1
            self.step_B[row] = 0
            self.live += 1
        new, entering = slice(first, self.live), self.sequence_B[first : self.live]
        last = np.array([self.prompts[sequence][-1] for sequence in entering], np.int64)
        self.token_B[new] = torch.from_numpy(last).to(self.device)
        self.position_B[new] = torch.from_numpy(self.length_B[new]).to(self.device)
        self.output_B[new] = torch.from_numpy(entering * self.sampling.max_new_tokens).to(self.device)
        self.ended_B[new] = False
        self._fill_cache(first)
        return True

    def _fill_cache(self, first: int) -> None:
        """Compute the prompts of all rows from `first` on. A prompt that is already in another row is copied."""
        row_of: dict[bytes, int] = {}
        computed: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for row in range(self.live):
            known = row_of.setdefault(self.prompts[self.sequence_B[row]].tobytes(), row)
            if row < first or self.length_B[row] == 0:
                continue
            if known == row:
                computed.append(row)
            else:
                sources.append(known)
                targets.append(row)
        limit = PREFILL_TOKENS["cpu" if self.device.type == "cpu" else "cuda"]
        for rows in micro_batches(computed, self.length_B[computed], limit):
            self._prefill(rows)
        if targets:
            self.cache.copy_rows(sources, targets, int(self.length_B[targets].max()))

    def _prefill(self, rows: Sequence[int]) -> None:
        ids_T = np.concatenate([self.prompts[self.sequence_B[row]][:-1] for row in rows])
        attend = Prefill(self.cache, rows, self.length_B[rows].tolist(), self.last_layer, self.device)
        try:
            self._backbone(torch.from_numpy(ids_T).long().to(self.device), attend.positions_T, attend)
        except PrefillDone:
            return

    def step(self) -> None:
        """Generate one more token for each sequence."""
        batch = slice(0, self.live)
        token_B, position_B, output_B = self.token_B[batch], self.position_B[batch], self.output_B[batch]
        attend = Decode(self.cache, position_B, int(self.length_B[batch].max()))
        hidden_BH = self._backbone(token_B, position_B, attend)
        drawn_B, logprob_B = self.sampler(hidden_BH, self.uniforms[output_B])
        self.tokens.index_copy_(0, output_B, drawn_B)
        self.logprobs.index_copy_(0, output_B, logprob_B)
        self.ended_B[batch] |= self.ends_V[drawn_B]
        token_B.copy_(drawn_B)
        position_B += 1
        output_B += 1
        self.length_B[batch] += 1
        self.step_B[batch] += 1
        self.steps += 1

    def _backbone(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Prefill | Decode) -> torch.Tensor:
        """Return hidden states [T, H]."""
        output = self.hf.base_model(
            input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, attend=attend
        )
        hidden_TH: torch.Tensor = output.last_hidden_state[0]
        return hidden_TH

    def retire(self) -> None:
        """Remove sequences that have ended from the batch, and move those in the last rows to the free rows.

        On a GPU this happens late; `completions` cuts off the tokens that are generated meanwhile.
        """
        batch = slice(0, self.live)
        full_B = self.step_B[batch] == self.sampling.max_new_tokens
        due = self.steps % STEPS_BETWEEN_CHECKS["cpu" if self.device.type == "cpu" else "cuda"] == 0
        if not due and not full_B.any():
            return
        over_B: NDArray[np.bool_] = full_B | self.ended_B[batch].cpu().numpy()
        if not over_B.any():
            return
        self.live -= int(over_B.sum())
        to = np.flatnonzero(over_B[: self.live])
        source = self.live + np.flatnonzero(~over_B[self.live :])
        if not len(to):
            return
        for array in (self.sequence_B, self.length_B, self.step_B):
            array[to] = array[source]
        moves = torch.from_numpy(np.stack([source, to])).to(self.device)
        for tensor in (self.token_B, self.position_B, self.output_B, self.ended_B):
            tensor[moves[1]] = tensor[moves[0]]
        self.cache.copy_rows(source.tolist(), to.tolist(), int(self.length_B[to].max()))

    def completions(self) -> list[Completion]:
        """Return the responses, each up to its first end-of-sequence token."""
        shape_NS = (len(self.prompts), self.sampling.max_new_tokens)
        ends_NS = self.ends_V[self.tokens].view(shape_NS).cpu().numpy()
        tokens_NS = self.tokens.view(shape_NS).to(torch.int32).cpu().numpy()
        logprobs_NS = self.logprobs.view(shape_NS).cpu().numpy()
        finished_N = ends_NS.any(axis=1)
        lengths_N = np.where(finished_N, ends_NS.argmax(axis=1) + 1, shape_NS[1])
        return [
            Completion(tokens[:length].copy(), logprobs[:length].copy(), bool(finished))
            for tokens, logprobs, length, finished in zip(tokens_NS, logprobs_NS, lengths_N, finished_N, strict=True)
        ]


def micro_batches(rows: Sequence[int], tokens: Sequence[int] | NDArray[np.int64], limit: int) -> Iterator[list[int]]:
    """Split `rows` into runs of at most `limit` tokens, or of a single row."""
    run: list[int] = []
    total = 0
    for row, count in zip(rows, tokens, strict=True):
        if run and total + count > limit:
            yield run
            run, total = [], 0
        run.append(row)
        total += int(count)
    if run:
        yield run
