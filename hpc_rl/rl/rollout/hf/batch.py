"""The sequences that the `hf` engine generates at a time.

Shape suffixes: B sequences, N of them that end, S steps, T tokens of a packed row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.rl.rollout.engine import Completion, Request, Span
from hpc_rl.rl.rollout.hf.kv_cache import Decode, KVCache, Prefill, PrefillDone, grown
from hpc_rl.rl.rollout.sampling import TokenSampler, groups_of, uniforms
from hpc_rl.training.models.attention.packed_attention import backbone_of, hidden_states, is_packed
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import logit_factor_of, softcap_of
from hpc_rl.training.models.mixers import mixers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Most prompt tokens of one forward pass (a longer prompt has its own pass). Larger passes are not faster."""
STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 8}
"""Steps between two checks for sequences that have ended. A check makes the host wait for the GPU."""


@dataclass
class _Sequence:
    """What the host keeps about a response that is being generated."""

    request: Request
    key: bytes
    """The prompt's tokens; prompts with the same key are computed once."""
    spans: tuple[Span, ...] = ()
    """Tokens of earlier weights."""

    def spans_of(self, tokens: int, version: int) -> tuple[Span, ...]:
        """Return the spans of the response so far, whose last tokens are of this version."""
        return (*self.spans, Span(version, tokens - sum(span.tokens for span in self.spans)))


class _Ended(NamedTuple):
    """A sequence that has left the batch."""

    sequence: _Sequence
    slot: int
    steps: int


class Slots:
    """Hold tokens, log-probabilities and uniform numbers of as many sequences as the batch has rows, on the device.

    A sequence keeps its slot, while its row in the batch may change.
    """

    def __init__(self, device: torch.device) -> None:
        self.uniforms = torch.zeros(0, 0, dtype=torch.float32, device=device)
        """[slots, steps], like the others."""
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros_like(self.uniforms)
        self._free: list[int] = []

    def grow(self, slots: int, steps: int) -> None:
        """Make room for more sequences and longer ones, and keep what is there."""
        self._free += range(self.tokens.shape[0], slots)
        self.uniforms, self.tokens, self.logprobs = (
            grown(tensor, (slots, steps)) for tensor in (self.uniforms, self.tokens, self.logprobs)
        )

    def take(self, seeds: Sequence[int], steps: int) -> list[int]:
        """Return a free slot for each sequence, with the uniform numbers of its seed for this many steps."""
        slots = [self._free.pop() for _ in seeds]
        drawn_NS = torch.from_numpy(uniforms(seeds, steps)).to(self.uniforms.device)
        self.uniforms[:, :steps].index_copy_(0, torch.tensor(slots, device=drawn_NS.device), drawn_NS)
        return slots

    def places(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> torch.Tensor:
        """Return where each sequence's token of a step is in the flattened tensors."""
        return torch.from_numpy(slots * self.tokens.shape[1] + steps).to(self.tokens.device)

    def read(self, slots: Sequence[int], steps: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the first tokens of some sequences and their log-probabilities, both [N, S]."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.tokens.device)
        tokens_NS, logprobs_NS = (x[:, :steps].index_select(0, index).cpu() for x in (self.tokens, self.logprobs))
        return tokens_NS.to(torch.int32).numpy(), logprobs_NS.numpy()

    def free(self, slots: Sequence[int]) -> None:
        """Take back the slots of sequences that have ended."""
        self._free += slots


class RunningBatch:
    """The sequences that are being generated.

    They are the first `live` rows, which are also rows of the cache. The state that steps need is on the device; the
    host counts lengths itself, since each step adds one token to each sequence.
    """

    def __init__(
        self, hf: PreTrainedModel, cache: KVCache, eos_token_ids: Collection[int], max_rows: int, version: int
    ) -> None:
        self.hf = hf
        self.cache = cache
        self.version = version
        self.head = hf.get_output_embeddings()
        self.weight_VH = self.head.weight
        self.device = device = self.weight_VH.device
        self.last_layer = hf.config.get_text_config().num_hidden_layers - 1
        self.slots = Slots(device)
        self.has_cache = is_packed(hf) and not mixers_of(hf, hf.config.get_text_config())
        """Whether the cache holds all that a model keeps of a text. Otherwise each step computes whole texts."""
        self.rows = 0
        self.softcap, self.logit_factor = softcap_of(hf), logit_factor_of(hf)
        self.sampler = self._sampler()
        self.groups = groups_of([], device)

        self.steps = 0
        self.sequences: list[_Sequence] = []
        self.ended: list[_Ended] = []
        """Sequences that have left the batch and still have their slots."""
        self.found: list[tuple[int, Completion]] = []
        self.slot_B = np.zeros(max_rows, np.int64)
        self.length_B = np.zeros(max_rows, np.int64)
        """Tokens of each row in the cache."""
        self.step_B = np.zeros(max_rows, np.int64)
        self.limit_B = np.zeros(max_rows, np.int64)
        """Most steps of each row."""

        self.token_B = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """The token of each row that enters the model next."""
        self.position_B = torch.zeros_like(self.token_B)
        self.output_B = torch.zeros_like(self.token_B)
        """Where each row's next token is written, in the flattened tensors of the slots."""
        self.ended_B = torch.zeros_like(self.token_B, dtype=torch.bool)

        self.ends_V = torch.zeros(self.weight_VH.shape[0], dtype=torch.bool)
        self.ends_V[[token for token in eos_token_ids if token < len(self.ends_V)]] = True
        self.host_ends_V: NDArray[np.bool_] = self.ends_V.numpy()
        self.ends_V = self.ends_V.to(device)

    def _sampler(self) -> TokenSampler:
        return TokenSampler(self.weight_VH, self.rows, self.softcap, getattr(self.head, "bias", None))

    @property
    def live(self) -> int:
        return len(self.sequences)

    def reserve(self, rows: int, columns: int, steps: int) -> None:
        """Make room for as many rows, and for sequences of as many columns and steps. Steps never decrease.

        Rows at least double, so that a batch to which requests are added one by one is rarely copied.
        """
        if rows > self.rows:
            self.rows = min(max(rows, 2 * self.rows), len(self.token_B))
            self.sampler = self._sampler()
        columns = max(columns, self.cache.columns)
        if self.rows > self.cache.rows or columns > self.cache.columns:
            self.cache.grow(max(self.rows, self.cache.rows), columns)
        if (self.rows, steps) != self.slots.tokens.shape:
            self.slots.grow(self.rows, steps)

    def admit(self, requests: Sequence[Request]) -> None:
        """Add sequences. They enter with their prompts in the cache, except for the last token."""
        self._free_slots()
        first = self.live
        self.sequences += [_Sequence(request, request.prompt.tobytes()) for request in requests]
        new = slice(first, self.live)
        self.length_B[new] = [len(request.prompt) - 1 for request in requests]
        self.step_B[new] = 0
        self.limit_B[new] = [request.sampling.max_new_tokens for request in requests]
        self.slot_B[new] = self.slots.take([request.seed for request in requests], int(self.limit_B[new].max()))
        last = np.array([request.prompt[-1] for request in requests], np.int64)
        self.token_B[new] = torch.from_numpy(last).to(self.device)
        self.position_B[new] = torch.from_numpy(self.length_B[new]).to(self.device)
        # Those of older rows too: the slots may have become longer.
        batch = slice(0, self.live)
        self.output_B[batch] = self.slots.places(self.slot_B[batch], self.step_B[batch])
        self.ended_B[new] = False
        self._regroup()
        self._fill_cache(first)

    def change_weights(self, version: int) -> None:
        """Continue with other weights: compute what is in the cache again. Sequences that have ended have left."""
        if version == self.version:
            return
        for sequence, steps in zip(self.sequences, self.step_B[: self.live].tolist(), strict=True):
            sequence.spans = sequence.spans_of(steps, self.version)
        if self.live:
            self._compute(range(self.live), [text[:-1] for text in self._texts()])
        self.version = version

    def _texts(self) -> list[NDArray[np.int32]]:
        """Return the tokens of each sequence, with its prompt."""
        batch = slice(0, self.live)
        tokens_BS, _ = self.slots.read(self.slot_B[batch].tolist(), int(self.step_B[batch].max()))
        drawn = (tokens_S[:steps] for tokens_S, steps in zip(tokens_BS, self.step_B[batch].tolist(), strict=True))
        return [np.concatenate([one.request.prompt, more]) for one, more in zip(self.sequences, drawn, strict=True)]

    def _regroup(self) -> None:
        self.groups = groups_of([sequence.request.sampling for sequence in self.sequences], self.device)

    def _fill_cache(self, first: int) -> None:
        """Compute the prompts of all rows from `first` on. A prompt that is already in another row is copied."""
        row_of: dict[bytes, int] = {}
        computed: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for row, sequence in enumerate(self.sequences):
            known = row_of.setdefault(sequence.key, row)
            if row < first or self.length_B[row] == 0:
                continue
            if known == row:
                computed.append(row)
            else:
                sources.append(known)
                targets.append(row)
        self._compute(computed, [self.sequences[row].request.prompt[:-1] for row in computed])
        if targets:
            self.cache.copy_rows(sources, targets, int(self.length_B[targets].max()))

    def _compute(self, rows: Sequence[int], texts: Sequence[NDArray[np.int32]]) -> None:
        """Compute keys and values of the texts, one for each row."""
        if not self.has_cache:
            return
        text_of = dict(zip(rows, texts, strict=True))
        for some in self._passes(rows, texts):
            ids_T = torch.from_numpy(np.concatenate([text_of[row] for row in some])).long().to(self.device)
            attend = Prefill(self.cache, some, [len(text_of[row]) for row in some], self.last_layer, self.device)
            with suppress(PrefillDone):
                self._backbone(ids_T, attend.positions_T, attend)

    def _passes(self, rows: Sequence[int], texts: Sequence[NDArray[np.int32]]) -> Iterator[list[int]]:
        limit = PREFILL_TOKENS["cpu" if self.device.type == "cpu" else "cuda"]
        return micro_batches(rows, [len(text) for text in texts], limit)

    def step(self) -> None:
        """Generate one more token for each sequence."""
        batch = slice(0, self.live)
        token_B, position_B, output_B = self.token_B[batch], self.position_B[batch], self.output_B[batch]
        if not self.has_cache:
            hidden_BH = self._recomputed()
        else:
            attend = Decode(self.cache, position_B, int(self.length_B[batch].max()))
            hidden_BH = self._backbone(token_B, position_B, attend)
        uniform_B = self.slots.uniforms.view(-1).index_select(0, output_B)
        drawn_B, logprob_B = self.sampler(self.logit_factor * hidden_BH, uniform_B, self.groups)
        self.slots.tokens.view(-1).index_copy_(0, output_B, drawn_B)
        self.slots.logprobs.view(-1).index_copy_(0, output_B, logprob_B)
        self.ended_B[batch] |= self.ends_V.index_select(0, drawn_B)
        token_B.copy_(drawn_B)
        position_B += 1
        output_B += 1
        self.length_B[batch] += 1
        self.step_B[batch] += 1
        self.steps += 1

    def _recomputed(self) -> torch.Tensor:
        """Return hidden states [B, H] of the last tokens, from the whole texts."""
        texts, found = self._texts(), []
        for some in self._passes(range(self.live), texts):
            row = pack_samples([texts[one] for one in some], [np.zeros(len(texts[one]), bool) for one in some])
            row = row.to(self.device).last_tokens()
            found.append(hidden_states(self.hf, row)[row.rows_N])
        return torch.cat(found)

    def _backbone(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Prefill | Decode) -> torch.Tensor:
        """Return hidden states [T, H]."""
        inputs = {"input_ids": ids_T[None], "position_ids": positions_T[None], "use_cache": False}
        hidden_TH: torch.Tensor = backbone_of(self.hf)(**inputs, attend=attend)[0][0]
        return hidden_TH

    def retire(self, at_once: bool) -> None:
        """Remove sequences that have ended from the batch, and move those in the last rows to the free rows.

        On a GPU this happens late, if it does not have to happen at once; the tokens that are generated meanwhile are
        cut off.
        """
        batch = slice(0, self.live)
        full_B = self.step_B[batch] == self.limit_B[batch]
        due = at_once or self.steps % STEPS_BETWEEN_CHECKS["cpu" if self.device.type == "cpu" else "cuda"] == 0
        if not due and not full_B.any():
            return
        over_B: NDArray[np.bool_] = full_B | self.ended_B[batch].cpu().numpy()
        if not over_B.any():
            return
        over = np.flatnonzero(over_B)
        for row, slot, steps in zip(over.tolist(), self.slot_B[over].tolist(), self.step_B[over].tolist(), strict=True):
            self.ended.append(_Ended(self.sequences[row], slot, steps))
        live = self.live - len(over)
        to = np.flatnonzero(over_B[:live])
        source = live + np.flatnonzero(~over_B[live:])
        self._move(source, to)
        del self.sequences[live:]
        if len(self.groups) > 1:
            self._regroup()

    def _move(self, source: NDArray[np.int64], to: NDArray[np.int64]) -> None:
        if not len(to):
            return
        for row, other in zip(to.tolist(), source.tolist(), strict=True):
            self.sequences[row] = self.sequences[other]
        for array in (self.slot_B, self.length_B, self.step_B, self.limit_B):
            array[to] = array[source]
        from_N, to_N = torch.from_numpy(np.stack([source, to])).to(self.device)
        for tensor in (self.token_B, self.position_B, self.output_B, self.ended_B):
            tensor.index_copy_(0, to_N, tensor.index_select(0, from_N))
        self.cache.copy_rows(source.tolist(), to.tolist(), int(self.length_B[to].max()))

    @property
    def unfinished(self) -> int:
        """Tokens so far of the sequences in the batch."""
        return int(self.step_B[: self.live].sum())

    def begun(self) -> Iterator[tuple[int, Completion]]:
        """Yield the tokens so far of the sequences that have any, with the numbers of their requests."""
        steps_B = self.step_B[: self.live].tolist()
        tokens_BS, logprobs_BS = self.slots.read(self.slot_B[: self.live].tolist(), max(steps_B, default=0))
        for sequence, steps, tokens_S, logprobs_S in zip(self.sequences, steps_B, tokens_BS, logprobs_BS, strict=True):
            if steps:
                spans = sequence.spans_of(steps, self.version)
                begun = Completion(tokens_S[:steps].copy(), logprobs_S[:steps].copy(), False, spans)
                yield sequence.request.number, begun

    def collect(self) -> list[tuple[int, Completion]]:
        """Return the responses that have ended since the last call, with the numbers of their requests."""
        self._free_slots()
        found, self.found = self.found, []
        return found

    def _free_slots(self) -> None:
        """Read the responses of sequences that have ended, each up to its first end-of-sequence token.

        This happens only when they or their slots are needed, because reading one at a time is slow.
        """
        if not self.ended:
            return
        slots = [ended.slot for ended in self.ended]
        steps_N = np.array([ended.steps for ended in self.ended])
        tokens_NS, logprobs_NS = self.slots.read(slots, int(steps_N.max()))
        ends_NS = self.host_ends_V[tokens_NS] & (np.arange(tokens_NS.shape[1]) < steps_N[:, None])
        finished_N: NDArray[np.bool_] = ends_NS.any(axis=1)
        lengths_N = np.where(finished_N, ends_NS.argmax(axis=1) + 1, steps_N)
        for (sequence, _, _), tokens_S, logprobs_S, length, finished in zip(
            self.ended, tokens_NS, logprobs_NS, lengths_N.tolist(), finished_N.tolist(), strict=True
        ):
            spans = sequence.spans_of(length, self.version)
            completion = Completion(tokens_S[:length].copy(), logprobs_S[:length].copy(), finished, spans)
            self.found.append((sequence.request.number, completion))
        self.slots.free(slots)
        self.ended.clear()


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
