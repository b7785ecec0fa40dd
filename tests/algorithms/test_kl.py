from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.algorithms import kl
from hpc_rl.config.rl.algorithm import KlConfig


def test_estimators_by_hand() -> None:
    # Probabilities 1/2 and 1/4: log ratio ref - policy = -ln 2.
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    ln2 = math.log(2)
    assert kl.k1(policy, reference).item() == pytest.approx(ln2)
    assert kl.k2(policy, reference).item() == pytest.approx(ln2**2 / 2)
    assert kl.k3(policy, reference).item() == pytest.approx(0.5 - 1 + ln2)


def test_every_configured_name_has_an_estimator() -> None:
    assert list(kl.KL_ESTIMATORS) == list(get_args(KlConfig.model_fields["estimator"].annotation))
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert [estimator(policy, reference).item() for estimator in kl.KL_ESTIMATORS.values()] == pytest.approx(
        [0.5, 0.125, math.exp(-0.5) - 1 + 0.5, math.exp(-0.5) - 1 + 0.5]
    )


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(name: str) -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimate = (policy * kl.KL_ESTIMATORS[name](policy.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx((policy * (policy / reference).log()).sum().item(), rel=1e-5)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6]).log()
    logprobs = logits.log_softmax(0)
    sampled = logprobs.detach().exp()  # tokens are drawn, so their probability has no gradient
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    through_k2 = torch.autograd.grad((sampled * kl.k2(logprobs, reference)).sum(), logits, retain_graph=True)[0]
    through_k1 = torch.autograd.grad((sampled * kl.k1(logprobs, reference)).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(through_k2, exact)
    unbiased = (sampled * kl.k3_unbiased(logprobs, reference)).sum()
    torch.testing.assert_close(torch.autograd.grad(unbiased, logits)[0], exact)
    torch.testing.assert_close(through_k1, torch.zeros(3), atol=1e-6, rtol=0)


@given(st.floats(-10.9, 2.6))
def test_k3_is_exact_and_not_negative(log_ratio: float) -> None:
    exact = torch.tensor(log_ratio).item()
    got = kl.k3(torch.zeros(1), torch.tensor([log_ratio])).item()
    assert got == pytest.approx(math.expm1(exact) - exact, rel=1e-5, abs=1e-6)
    assert got >= 0


@pytest.mark.parametrize("log_ratio", [2.62, 500.0, -11.1, -500.0])
def test_k3_is_limited(log_ratio: float) -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    divergence = kl.k3(logprobs, torch.tensor([log_ratio]))
    divergence.backward()
    assert divergence.item() == 10.0
    assert logprobs.grad is not None and logprobs.grad.item() == 0.0


def test_k3_has_no_gradient_where_its_exponential_would_overflow() -> None:
    policy = torch.tensor([-200.0, -1.0], requires_grad=True)
    kl.k3(policy, torch.tensor([-1.0, -2.0])).sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-1)])


def test_adaptive_coefficient_by_hand() -> None:
    controller = kl.AdaptiveKl(coef=0.1, target=6.0, horizon=1000)
    controller.update(6.6, 100)  # 10 % over: 0.1 * (1 + 0.1 * 100 / 1000)
    assert controller.coef == pytest.approx(0.101)
    controller.update(60.0, 100)  # far over: held at 20 %, 0.101 * (1 + 0.2 * 0.1)
    assert controller.coef == pytest.approx(0.101 * 1.02)
    controller.update(0.0, 100)
    assert controller.coef == pytest.approx(0.101 * 1.02 * 0.98)
    controller.update(6.0, 100)
    assert controller.coef == pytest.approx(0.101 * 1.02 * 0.98)


def test_a_step_of_many_horizons_keeps_the_coefficient_positive() -> None:
    controller = kl.AdaptiveKl(coef=1.0, target=1.0, horizon=1)
    controller.update(0.0, 100)
    assert controller.coef == pytest.approx(0.8)


def test_a_fixed_coefficient() -> None:
    controller = kl.AdaptiveKl(coef=0.1, target=None, horizon=1000)
    controller.update(50.0, 1000)
    assert controller.coef == 0.1
