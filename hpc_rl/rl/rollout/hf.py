"""Generation with an unchanged Hugging Face model, in the process that holds it.

Nothing is padded: prompts are computed packed, sequences of different length stand side by side in the cache, one that
ends leaves the batch at once and a waiting one takes its place (continuous batching: Yu et al., Orca,
https://www.usenix.org/conference/osdi22/presentation/yu).

Shape suffixes: N sequences of one call, B those in the batch now, S steps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hpc_rl.errors import UserError
from hpc_rl.rl.rollout.base import Completion, Sampling
from hpc_rl.rl.rollout.kv_cache import Decode, KVCache, Prefill, PrefillDone
from hpc_rl.rl.rollout.sampling import Sampler, uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Most prompt tokens of one forward pass (a longer prompt has one of its own): past these a pass gains no speed."""
STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 8}
"""Steps after which the host asks which sequences have ended. On a GPU asking means to wait for it."""
REFILL_SHARE = 8
"""Waiting sequences enter when one in so many places of the batch is free: small prefills are slow."""


class HfRollout:
    """A RolloutEngine. `sleep` frees the cache; the model stays where it is."""

    def __init__(self, hf: PreTrainedModel, eos_token_ids: Collection[int], max_num_seqs: int = 256) -> None:
        """
        Args:
            hf: loaded by engine.model.load_model, not sharded. It may be the module that is being trained: then
                `load_weights` is not needed.
            eos_token_ids: tokens that end a response.
            max_num_seqs: sequences that are generated at a time.
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
            UserError: the longest prompt and max_new_tokens are more than the model has positions.
        """
        if not prompts:
            return []
        columns = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        limit = getattr(self.hf.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and columns > limit:
            raise UserError(
                f"a prompt of {columns - sampling.max_new_tokens} tokens and a response of {sampling.max_new_tokens} "
                f"are more than the model's {limit} positions: lower data.max_prompt_length or data.max_response_length"
            )
        cache = self._cache_of(min(self.max_num_seqs, len(prompts)), columns)
        with torch.inference_mode(), evaluating(self.hf):
            generation = _Generation(self.hf, cache, self.eos_token_ids, prompts, seeds, sampling)
            while generation.admit():
                generation.step()
                generation.retire()
            return generation.completions()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy into the model's parameters; names are those of its named_parameters(), tied ones once.

        Raises:
            ValueError: no parameter of that name and shape.
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
        """The next call of `generate` takes what it needs."""

    def _cache_of(self, rows: int, columns: int) -> KVCache:
        """The one from last time where it is large enough. It is filled anew."""
        if self._cache is None or self._cache.rows < rows or self._cache.columns < columns:
            self._cache = None  # before the new one is there
            self._cache = KVCache(rows, columns)
        return self._cache


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """No dropout; afterwards every submodule is in the mode it was in."""
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

    The batch is the first `live` places; place and row of the cache are the same number. What steps need is on the
    device; the host knows lengths without asking, since each step adds one token to each sequence.
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
        self.places = min(cache.rows, len(prompts))
        self.waiting = list(range(len(prompts)))[::-1]
        self.sampler = Sampler(weight_VH, self.places, sampling)

        self.live = 0
        self.sequence_B = np.zeros(self.places, np.int64)
        self.length_B = np.zeros(self.places, np.int64)
        """Tokens that a sequence has in the cache."""
        self.step_B = np.zeros(self.places, np.int64)
        self.steps = 0

        self.token_B = torch.zeros(self.places, dtype=torch.int64, device=device)
        """The token that enters the model next."""
        self.position_B = torch.zeros_like(self.token_B)
        self.output_B = torch.zeros_like(self.token_B)
        """Where the next token is written, in the outputs of all sequences end to end."""
        self.ended_B = torch.zeros_like(self.token_B, dtype=torch.bool)

        size = len(prompts) * sampling.max_new_tokens
        self.uniforms = torch.from_numpy(uniforms(seeds, sampling.max_new_tokens)).to(device).view(-1)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(size, dtype=torch.float32, device=device)
        ends_V = np.zeros(weight_VH.shape[0], bool)
        ends_V[[token for token in eos_token_ids if token < len(ends_V)]] = True
        self.ends_V = torch.from_numpy(ends_V).to(device)

    def admit(self) -> bool:
        """Fill free places. A new sequence enters with all of its prompt in the cache but the last token.

        Returns:
            whether there is anything to do.
        """
        room = self.places - self.live
        if not self.waiting or (self.live and room * REFILL_SHARE < self.places):
            return self.live > 0
        first = self.live
        for place in range(first, first + min(room, len(self.waiting))):
            sequence = self.waiting.pop()
            self.sequence_B[place] = sequence
            self.length_B[place] = len(self.prompts[sequence]) - 1
            self.step_B[place] = 0
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
        """Compute the prompts of all places from `first` on; one that another place has too is copied."""
        place_of: dict[bytes, int] = {}
        computed: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for place in range(self.live):
            known = place_of.setdefault(self.prompts[self.sequence_B[place]].tobytes(), place)
            if place < first or self.length_B[place] == 0:
                continue
            if known == place:
                computed.append(place)
            else:
                sources.append(known)
                targets.append(place)
        limit = PREFILL_TOKENS["cuda" if self.device.type == "cuda" else "cpu"]
        for places in micro_batches(computed, self.length_B[computed], limit):
            self._prefill(places)
        if targets:
            self.cache.copy_rows(sources, targets, int(self.length_B[targets].max()))

    def _prefill(self, places: Sequence[int]) -> None:
        ids_T = np.concatenate([self.prompts[self.sequence_B[place]][:-1] for place in places])
        attend = Prefill(self.cache, places, self.length_B[places].tolist(), self.last_layer, self.device)
        try:
            self._backbone(torch.from_numpy(ids_T).long().to(self.device), attend.positions_T, attend)
        except PrefillDone:
            return

    def step(self) -> None:
        """One more token for each sequence."""
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
        """Hidden states [T, H]."""
        output = self.hf.base_model(
            input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, attend=attend
        )
        hidden_TH: torch.Tensor = output.last_hidden_state[0]
        return hidden_TH

    def retire(self) -> None:
        """Take sequences that have ended out of the batch; those in the last places move to the free ones.

        On a GPU they are noticed late. What they generate meanwhile is cut off in `completions`.
        """
        batch = slice(0, self.live)
        full_B = self.step_B[batch] == self.sampling.max_new_tokens
        due = self.steps % STEPS_BETWEEN_CHECKS["cuda" if self.device.type == "cuda" else "cpu"] == 0
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
        """Each up to its first end-of-sequence token."""
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


def micro_batches(places: Sequence[int], tokens: Sequence[int] | NDArray[np.int64], limit: int) -> Iterator[list[int]]:
    """Cut `places` into runs of at most `limit` tokens, or of one place."""
    run: list[int] = []
    total = 0
    for place, count in zip(places, tokens, strict=True):
        if run and total + count > limit:
            yield run
            run, total = [], 0
        run.append(place)
        total += int(count)
    if run:
        yield run
