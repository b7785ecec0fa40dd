"""The chunked loss of distillation: the same values and gradients as with all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hpc_rl.algorithms.divergences import DIVERGENCES, top_k_logprobs
from hpc_rl.training.models import lm_head
from hpc_rl.training.models.distill_head import Terms, distillation_sum, in_chunks, live, stored

POSITIONS, TOKENS = 37, 101


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lm_head.CHUNK_BYTES, "cpu", 4 * TOKENS * 8)  # 8 positions


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(TOKENS, 16, generator=generator).to(dtype).requires_grad_()
    # The teacher's states and head are the student's, and eight noisy columns.
    theirs = torch.cat([hidden.detach(), 2 * torch.randn(POSITIONS, 8, generator=generator).to(dtype)], dim=1)
    their_weight = torch.cat([weight.detach(), torch.randn(TOKENS, 8, generator=generator).to(dtype)], dim=1)
    return hidden, weight, torch.randint(TOKENS, (POSITIONS,), generator=generator), theirs, their_weight


def plain(
    terms: Terms, top_k: int | None, *tensors: torch.Tensor, softcap: float | None = None
) -> tuple[torch.Tensor, list[float]]:
    hidden, weight, targets, theirs, their_weight = tensors
    logits, their_logits = hidden @ weight.t(), theirs @ their_weight.t()
    if softcap is not None:
        logits, their_logits = (softcap * torch.tanh(each / softcap) for each in (logits, their_logits))
    student, teacher = ((each / terms.temperature).log_softmax(dim=1) for each in (logits, their_logits))
    agreement = float((logits.argmax(dim=1) == their_logits.argmax(dim=1)).sum())
    if top_k is not None:
        ids = teacher.topk(top_k, dim=1).indices
        student, teacher = top_k_logprobs(student, ids), top_k_logprobs(teacher, ids)
    divergence = DIVERGENCES[terms.divergence](teacher, student, terms.js_weight).sum()
    cross_entropy = functional.cross_entropy(logits, targets, reduction="sum")
    loss = terms.temperature**2 * divergence + terms.sft_coeff * cross_entropy
    return loss, [divergence.item(), cross_entropy.item(), agreement]


CASES = {
    "forward": Terms("forward"),
    "reverse": Terms("reverse", temperature=2.0),
    "js": Terms("js", js_weight=0.3, sft_coeff=0.4),
    "forward, all terms": Terms("forward", temperature=0.7, sft_coeff=0.2),
}


@pytest.mark.parametrize(("top_k", "softcap"), [(None, None), (None, 10.0), (5, None)])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_those_of_plain_logits(name: str, top_k: int | None, softcap: float | None) -> None:
    terms, tensors = CASES[name], inputs()
    hidden, weight, targets, theirs, their_weight = tensors
    teaching = live(theirs, their_weight, terms.temperature, top_k, softcap)
    ours, sums = distillation_sum(hidden, weight, targets, teaching, terms, scale=0.3, softcap=softcap)
    expected, expected_sums = plain(terms, top_k, *tensors, softcap=softcap)
    torch.testing.assert_close(ours, 0.3 * expected)
    assert sums.tolist() == pytest.approx(expected_sums, rel=1e-5) and not sums.requires_grad
    assert 0 < sums[2] < POSITIONS
    found = torch.autograd.grad(2.5 * ours, (hidden, weight))
    for got, wanted in zip(found, torch.autograd.grad(0.3 * 2.5 * expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_what_was_stored_equals_what_is_live() -> None:
    hidden, weight, targets, theirs, their_weight = inputs()
    terms = Terms("forward", temperature=2.0)
    teaching = live(theirs, their_weight, terms.temperature, 5, None)
    parts = in_chunks(teaching, POSITIONS, their_weight)
    assert len(parts) == 5
    ids = torch.cat([part.ids_CK for part in parts if part.ids_CK is not None])
    later = stored(ids, torch.cat([part.logprobs_CV for part in parts]))
    found = [distillation_sum(hidden, weight, targets, one, terms) for one in (teaching, later)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_gradients_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, theirs, their_weight = inputs()
    teaching, terms = live(theirs, their_weight, 1.0, None, None), Terms("reverse")
    both = torch.autograd.grad(distillation_sum(hidden, weight, targets, teaching, terms)[0], (hidden, weight))
    frozen, _ = distillation_sum(hidden, weight.detach(), targets, teaching, terms)
    torch.testing.assert_close(torch.autograd.grad(frozen, hidden)[0], both[0], atol=0, rtol=0)
    monkeypatch.setattr(lm_head.HeadGradients, "add", None)
    with torch.no_grad():
        assert not distillation_sum(hidden, weight, targets, teaching, terms)[0].requires_grad


def test_no_targets_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets, theirs, their_weight = inputs()
    teaching = live(theirs[:0], their_weight, 1.0, None, None)
    loss, sums = distillation_sum(hidden[:0], weight, targets[:0], teaching, Terms("forward"))
    assert loss.item() == 0 and sums.tolist() == [0, 0, 0]
    assert not torch.autograd.grad(loss, weight)[0].any()


def test_bfloat16_sums_in_float32() -> None:
    tensors = inputs(torch.bfloat16)
    hidden, weight, targets, theirs, their_weight = tensors
    ours, _ = distillation_sum(hidden, weight, targets, live(theirs, their_weight, 1.0, None, None), Terms("forward"))
    exact = [tensor.detach().float() if tensor.is_floating_point() else tensor for tensor in tensors]
    exact[:2] = [tensor.requires_grad_() for tensor in exact[:2]]
    expected, _ = plain(Terms("forward"), None, *exact)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    found = torch.autograd.grad(ours, (hidden, weight))
    for got, wanted in zip(found, torch.autograd.grad(expected, exact[:2]), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - wanted).norm() < 0.02 * wanted.norm()
