"""Compare packed rows with plain forward passes when a model is loaded, so that a wrong result is an error.

Attributes of a model cannot tell whether its layers keep samples apart: a model may carry a state from token to token,
or change its logits, under any name. A few tokens show it for every model. Without packing, they show whether a token
depends on those after it, as in an encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hpc_rl.errors import UserError
from hpc_rl.formats.model_families import UNPACK
from hpc_rl.training.models.attention.packed_attention import ATTENTION, backbone_of, is_packed
from hpc_rl.training.models.attention.packed_batch import PackedBatch, pack_samples
from hpc_rl.training.models.causal_lm import PackedModel, evaluating, head_inputs, softcap_of
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard

LENGTHS = (7, 12, 6)
"""Tokens of the samples that are compared."""
_FIRST = 4
"""Tokens at the start of each sample that decide: what leaks from the sample before is strongest there, and their
median ignores a single token that rounding sends to another expert."""
_TOLERANCES = {2: (0.2, 0.02), 4: (1e-4, 1e-3)}
"""Bytes of a number -> largest relative difference of the hidden states, which is the rounding of all layers, and of
the logits of the same hidden states, which is one rounding. Rounding of small models is 5e-7 or 0.01. A short
convolution with weights of 0.02 that computes samples as one changes hidden states by 5e-4, which bfloat16 hides."""

_APART = (
    "cannot be trained in packed rows: the hidden states of a sample are not those that the sample has alone",
    UNPACK,
)
_CAUSAL = "cannot be trained: the hidden states of a token depend on the tokens after it", "use another model"
_LOGITS = "change their logits in a way that the chunked loss does not compute", "use another model"
"""What is wrong, and what to do."""


def check_packing(model: PackedModel, world: World) -> None:
    """Compare the hidden states of a packed row with those of each sample alone in transformers' own attention, and the
    logits of our LM head with those of the model. Without packing, compare the hidden states of samples with those of
    their first tokens alone. Every rank calls this, before layers are compiled.

    Raises:
        AgreedError: they differ; every rank raises this.
    """
    batch, packed = _batch(model).to(world.device), is_packed(model.hf)
    with torch.no_grad(), evaluating(model), _forward(model, _packed):
        together_TH, size = model(batch)
    found = []
    own_attention = _own_attention(model) if packed else nullcontext()
    with torch.no_grad(), evaluating(model), _forward(model, _plain), own_attention:
        for ids_T, ours_TH in zip(batch.input_ids_T.split(LENGTHS), together_TH.split(LENGTHS), strict=True):
            plain_TH, logits = model(ids_T if packed else ids_T[:_FIRST])
            found.append((_difference(ours_TH, plain_TH), 0.0 if logits is None else _difference(*logits)))
    reshard(model)
    world.together(lambda: _refuse(model, (_APART if packed else _CAUSAL, _LOGITS), _TOLERANCES[size], found))


def _refuse(
    model: PackedModel,
    problems: tuple[tuple[str, str], ...],
    allowed: tuple[float, float],
    found: list[tuple[float, float]],
) -> None:
    """Raise UserError for differences that rounding does not explain. NaN is one of them."""
    name = f"{model.hf.config.name_or_path}: models of type {model.hf.config.get_text_config().model_type}"
    for (problem, remedy), limit, differences in zip(problems, allowed, zip(*found, strict=True), strict=True):
        if not all(difference <= limit for difference in differences):
            each = ", ".join(f"{difference:.2g}" for difference in differences)
            raise UserError(f"{name} {problem} (relative differences: {each}; allowed: {limit:g}): {remedy}")


def _batch(model: PackedModel) -> PackedBatch:
    """Return a row of random tokens, the same on every rank, with a result at each position."""
    ids = np.random.default_rng(0).integers(1, len(_embeddings(model)), sum(LENGTHS))
    samples = np.split(ids, list(accumulate(LENGTHS))[:-1])
    row = pack_samples(samples, [np.zeros(len(one), bool) for one in samples])
    return replace(row, rows=np.arange(len(ids)), rows_N=torch.arange(len(ids)), targets_N=row.input_ids_T)


def _embeddings(model: PackedModel) -> torch.Tensor:
    """Return the input embeddings, [V, H]."""
    weight_VH: torch.Tensor = model.hf.get_input_embeddings().get_parameter("weight")
    return weight_VH


def _packed(model: PackedModel, batch: PackedBatch) -> tuple[torch.Tensor, int]:
    """Return the hidden states of a packed row, [T, H], and the bytes of the least exact numbers."""
    own = model.sequence.own(batch)
    hidden_TH = model.sequence.whole(model.hidden(own)[own.rows_N], batch)
    return hidden_TH, min(hidden_TH.itemsize, _embeddings(model).itemsize)


def _plain(model: PackedModel, ids_T: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return the hidden states of one sample, [T, H], and for these the logits of our LM head and those of the model,
    [T, V]; no logits of a classifier."""
    backbone, inputs = backbone_of(model.hf), {"input_ids": ids_T[None], "use_cache": False}
    if model.hf.get_output_embeddings() is None:
        return backbone(**inputs)[0][0], None
    kept: list[torch.Tensor] = []
    hook = backbone.register_forward_hook(lambda _base, _inputs, output: kept.append(output[0][0]))
    try:
        logits_TV = model.hf(**inputs).logits[0]
    finally:
        hook.remove()
    hidden_TH = kept[0] if kept else backbone(**inputs)[0][0]  # OPT calls a part of its backbone
    hidden_TX, weight_VX = head_inputs(model.hf, hidden_TH)
    own_TV, cap = hidden_TX @ weight_VX.T, softcap_of(model.hf)
    return hidden_TH, (own_TV if cap is None else cap * torch.tanh(own_TV / cap), logits_TV)


def _difference(ours_TX: torch.Tensor, theirs_TX: torch.Tensor) -> float:
    """Return the median relative difference of the first tokens; infinity for other shapes."""
    if ours_TX.shape[1] != theirs_TX.shape[1]:
        return math.inf
    ours, theirs = ours_TX[:_FIRST].float(), theirs_TX[:_FIRST].float()
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)).median())


@contextmanager
def _forward(model: PackedModel, run: Callable[[PackedModel, Any], Any]) -> Iterator[None]:
    """Let the model run another function, inside the hooks with which FSDP gathers its weights."""
    model.forward = lambda argument: run(model, argument)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


@contextmanager
def _own_attention(model: PackedModel) -> Iterator[None]:
    """Compute attention as transformers does."""
    model.hf.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.hf.set_attn_implementation(ATTENTION)
