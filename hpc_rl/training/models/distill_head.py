"""The loss of distillation from hidden states, without holding the logits of all positions at once.

As in lm_head.py, positions are processed in chunks, and the gradients of hidden states and weight are computed in the
same pass. Within a chunk, autograd differentiates the loss of its logits, so that a divergence is one function
(hpc_rl/algorithms/divergences.py) and needs no derivative by hand.

Shape suffixes: N positions, H and G hidden sizes of student and teacher, V vocabulary, C positions of one chunk, K most
probable tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpc_rl.algorithms.divergences import DIVERGENCES, top_k_logprobs
from hpc_rl.training.models.attention.exact_attention import capped
from hpc_rl.training.models.lm_head import HeadGradients, chunks, differentiated, float32_logits, saved_gradients

_MATRICES = {"cpu": 1, "gpu": 4}
"""Divisor of a chunk's size: about ten matrices [C, V] exist at a time, which is much on a GPU, where chunks are
large."""
SUMS = ("divergence", "cross_entropy", "agreement")
"""What `distillation_sum` adds up for metrics: the divergence and the cross-entropy of the data, in nats, and the
number of positions at which teacher and student have the same most probable token."""


class Taught(NamedTuple):
    """The teacher's distribution at some positions, at the temperature of the loss."""

    logprobs_CV: torch.Tensor
    """Log-probabilities of the whole vocabulary or, if `ids_CK` is given, of these tokens and all others together
    [C, K + 1]; float32."""
    ids_CK: torch.Tensor | None = None
    """The teacher's K most probable tokens, the most probable first: int64."""


Teaching = Callable[[slice], Taught]
"""Positions -> the teacher's distribution at them."""


@dataclass(frozen=True)
class Terms:
    """The loss of a position: temperature^2 * divergence + sft_coeff * cross-entropy of the target.

    The square keeps the size of the gradient independent of the temperature (Hinton et al. 2015,
    https://arxiv.org/abs/1503.02531, section 2). Only the divergence is at this temperature.
    """

    divergence: str
    """A name in DIVERGENCES."""
    js_weight: float = 0.5
    temperature: float = 1.0
    sft_coeff: float = 0.0


def live(
    hidden_NG: torch.Tensor, weight_VG: torch.Tensor, temperature: float, top_k: int | None, softcap: float | None
) -> Teaching:
    """Return the distributions of a teacher that has just computed its hidden states.

    Args:
        top_k: K; None for the whole vocabulary.
        softcap: cap of the logits; see lm_head.cross_entropy_sum.
    """

    @torch.no_grad()
    def taught(rows: slice) -> Taught:
        hidden_CG = hidden_NG[rows]
        logits_CV = hidden_CG.new_empty(len(hidden_CG), len(weight_VG), dtype=torch.float32)
        logits_CV = capped(float32_logits(hidden_CG, weight_VG, logits_CV), softcap).div_(temperature)
        logprobs_CV = torch.log_softmax(logits_CV, dim=1, out=logits_CV)
        if top_k is None:
            return Taught(logprobs_CV)
        ids_CK = logprobs_CV.topk(top_k, dim=1).indices
        return Taught(top_k_logprobs(logprobs_CV, ids_CK), ids_CK)

    return taught


def stored(ids_NK: torch.Tensor, logprobs_NK: torch.Tensor) -> Teaching:
    """Return the distributions of a teacher of which these were stored; see Taught."""
    return lambda rows: Taught(logprobs_NK[rows], ids_NK[rows])


def in_chunks(teaching: Teaching, positions: int, weight_VG: torch.Tensor) -> list[Taught]:
    """Return the distributions at all positions, a chunk each. Those over the whole vocabulary would be large."""
    return [teaching(rows) for rows in chunks(positions, weight_VG, _matrices(weight_VG))]


def distillation_sum(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    teaching: Teaching,
    terms: Terms,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `scale` times the sum of the losses of all positions, a float32 scalar, and the sums of SUMS, [3].

    The gradients of hidden states and weight are computed in the same pass, but not below torch.no_grad.

    Args:
        hidden_NH: the student's, float32 or bfloat16; logits and the weight's gradient are float32 in both cases.
        weight_VH: the student's head, with the rows of the teacher's.
        targets_N: int64.
        softcap: cap of the student's logits; see lm_head.cross_entropy_sum.
    """

    def loss_of(rows: slice, logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _loss(capped(logits_CV, softcap), targets_N[rows], teaching(rows), terms)

    total, sums = _ChunkedSum.apply(*differentiated(hidden_NH, weight_VH), loss_of, scale)
    return total, sums


def _loss(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, taught: Taught, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a chunk, differentiable with respect to its logits, and its sums."""
    logprobs_CV = torch.log_softmax(logits_CV, dim=1)
    cross_entropy_C = -logprobs_CV.gather(1, targets_C[:, None])[:, 0]
    student_CV = logprobs_CV
    if terms.temperature != 1:
        student_CV = torch.log_softmax(logits_CV / terms.temperature, dim=1)
    if taught.ids_CK is not None:
        student_CV = top_k_logprobs(student_CV, taught.ids_CK)
    divergence_C = DIVERGENCES[terms.divergence](taught.logprobs_CV, student_CV, terms.js_weight)
    loss = terms.temperature**2 * divergence_C.sum()
    if terms.sft_coeff:
        loss = loss + terms.sft_coeff * cross_entropy_C.sum()
    with torch.no_grad():
        best_C = taught.logprobs_CV.argmax(dim=1) if taught.ids_CK is None else taught.ids_CK[:, 0]
        agreement = (logits_CV.argmax(dim=1) == best_C).sum()
        sums = torch.stack([divergence_C.sum(), cross_entropy_C.sum(), agreement.float()])
    return loss, sums


def _matrices(weight_VH: torch.Tensor) -> int:
    return _MATRICES["cpu" if weight_VH.device.type == "cpu" else "gpu"]


class _ChunkedSum(torch.autograd.Function):
    """The sum over chunks of a loss of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        loss_of: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradients = HeadGradients(ctx, hidden_NH, weight_VH, scale)
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        sums = hidden_NH.new_zeros(len(SUMS), dtype=torch.float32)
        for rows in chunks(hidden_NH.shape[0], weight_VH, _matrices(weight_VH)):
            hidden_CH = hidden_NH[rows]
            logits_CV = hidden_CH.new_empty(len(hidden_CH), len(weight_VH), dtype=torch.float32)
            float32_logits(hidden_CH, weight_VH, logits_CV)
            with torch.set_grad_enabled(gradients.needed):
                loss, found = loss_of(rows, logits_CV.requires_grad_(gradients.needed))
            total += loss.detach()
            sums += found
            if gradients.needed:
                (grad_CV,) = torch.autograd.grad(loss, logits_CV)
                del loss
                grad_CV = grad_CV.to(hidden_NH.dtype)  # frees the float32 one before the products
                gradients.add(rows, grad_CV)
        gradients.save(ctx)
        ctx.mark_non_differentiable(sums)
        return total * scale, sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        return *saved_gradients(ctx, grads[0]), None, None
