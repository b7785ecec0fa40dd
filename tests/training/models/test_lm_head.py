from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hpc_rl.training.models import lm_head
from hpc_rl.training.models.lm_head import _LogProbs, cross_entropy_sum, token_logprobs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lm_head.CHUNK_BYTES, "cpu", 4 * 101 * 8)  # 8 positions
    monkeypatch.setattr(lm_head, "CPU_ROWS", 40)


def inputs(positions: int = 37, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(positions, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(101, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(101, (positions,), generator=generator)


def grads(value: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(value, tensors)


@pytest.mark.parametrize("scale", [1.0, 0.03])
@pytest.mark.parametrize("upstream", [1.0, 2.5])
def test_cross_entropy_equals_plain_logits(scale: float, upstream: float) -> None:
    hidden, weight, targets = inputs()
    ours = cross_entropy_sum(hidden, weight, targets, scale)
    plain = scale * functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    torch.testing.assert_close(ours, plain)
    for got, wanted in zip(
        grads(ours * upstream, hidden, weight), grads(plain * upstream, hidden, weight), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_cross_entropy_of_capped_logits(softcap: float) -> None:
    hidden, weight, targets = inputs()
    ours = cross_entropy_sum(hidden, weight, targets, 0.3, softcap)
    capped = softcap * torch.tanh(hidden @ weight.t() / softcap)
    plain = 0.3 * functional.cross_entropy(capped, targets, reduction="sum")
    torch.testing.assert_close(ours, plain)
    for got, wanted in zip(grads(ours, hidden, weight), grads(plain, hidden, weight), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_chunks_of_capped_logits_share_one_slope() -> None:
    """The plan counts one buffer more than without a cap."""
    hidden, weight, _ = inputs()
    log_softmax = _LogProbs(weight.detach(), 2.0, gradients=True)
    log_softmax(hidden.detach())
    slope = log_softmax.slope_CV
    assert slope is not None and slope.shape == (len(hidden), len(weight))
    last = hidden.detach()[:3]
    log_softmax(last)
    assert log_softmax.slope_CV is slope
    expected = 1 - torch.tanh(last @ weight.detach().t() / 2.0) ** 2
    torch.testing.assert_close(log_softmax.without_cap(torch.ones(3, len(weight))), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_capped_logits(temperature: float) -> None:
    """The cap comes before the temperature."""
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, softcap=2.0)
    capped = 2.0 * torch.tanh(hidden @ weight.t() / 2.0)
    distribution = torch.distributions.Categorical(logits=capped / temperature)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy(), atol=1e-5, rtol=1e-5)
    mix = torch.linspace(-1, 1, len(targets))
    ours = (mix * logprobs).sum() + (mix.flip(0) * entropy).sum()
    plain = (mix * distribution.log_prob(targets)).sum() + (mix.flip(0) * distribution.entropy()).sum()
    for got, wanted in zip(grads(ours, hidden, weight), grads(plain, hidden, weight), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_cross_entropy_in_bfloat16_sums_in_float32() -> None:
    hidden, weight, targets = inputs(positions=400, dtype=torch.bfloat16)
    ours = cross_entropy_sum(hidden, weight, targets)
    exact_hidden, exact_weight = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    exact = functional.cross_entropy(exact_hidden @ exact_weight.t(), targets, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=0)
    for got, wanted in zip(grads(ours, hidden, weight), grads(exact, exact_hidden, exact_weight), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - wanted).norm() < 0.01 * wanted.norm()


def test_gradients_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs()
    frozen = weight.detach()
    torch.testing.assert_close(
        *(grads(cross_entropy_sum(hidden, w, targets), hidden)[0] for w in (frozen, weight)), atol=0, rtol=0
    )
    monkeypatch.setattr(lm_head.HeadGradients, "add", None)
    with torch.no_grad():
        assert not cross_entropy_sum(hidden, weight, targets).requires_grad


def test_no_targets_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets = inputs(positions=0)
    loss = cross_entropy_sum(hidden, weight, targets)
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in grads(loss, hidden, weight))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_with_any_upstream_gradient(temperature: float) -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.t() / temperature)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy(), atol=1e-5, rtol=1e-5)
    mix = torch.linspace(-1, 1, len(targets))
    ours = (mix * logprobs.exp()).sum() + (mix.flip(0) * entropy).sum()
    plain = (mix * distribution.log_prob(targets).exp()).sum() + (mix.flip(0) * distribution.entropy()).sum()
    for got, wanted in zip(grads(ours, hidden, weight), grads(plain, hidden, weight), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_of_bfloat16_are_not_rounded(temperature: float) -> None:
    hidden, weight, targets = (tensor.detach() for tensor in inputs(dtype=torch.bfloat16))
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature)
    distribution = torch.distributions.Categorical(logits=hidden.float() @ weight.float().t() / temperature)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy, distribution.entropy(), atol=1e-5, rtol=1e-6)


def test_logits_far_apart_stay_finite() -> None:
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = cross_entropy_sum(hidden, weight, torch.tensor([1]))
    assert loss.item() == 400.0
    assert all(grad.isfinite().all() for grad in grads(loss, hidden, weight))
