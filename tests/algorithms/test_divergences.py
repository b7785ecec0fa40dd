"""Divergences of distillation, compared with torch's own and with sums over the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hpc_rl.algorithms.divergences import DIVERGENCES, top_k_logprobs
from hpc_rl.config.training.distill import DistillLossConfig

GENERATOR = torch.Generator().manual_seed(5)
TEACHER = (3 * torch.randn(7, 11, generator=GENERATOR)).log_softmax(dim=1)
STUDENT = (3 * torch.randn(7, 11, generator=GENERATOR)).log_softmax(dim=1)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of log-probabilities, by torch."""
    return functional.kl_div(q, p, log_target=True, reduction="none").sum(dim=1)


def test_the_configuration_lists_every_divergence() -> None:
    listed = DistillLossConfig.model_fields["divergence"].annotation
    assert set(listed.__args__) == set(DIVERGENCES)  # type: ignore[union-attr]


def test_forward_and_reverse_differ_in_their_order() -> None:
    torch.testing.assert_close(DIVERGENCES["forward"](TEACHER, STUDENT, 0.5), kl(TEACHER, STUDENT))
    torch.testing.assert_close(DIVERGENCES["reverse"](TEACHER, STUDENT, 0.5), kl(STUDENT, TEACHER))


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_jensen_shannon(weight: float) -> None:
    mixture = (weight * TEACHER.exp() + (1 - weight) * STUDENT.exp()).log()
    expected = weight * kl(TEACHER, mixture) + (1 - weight) * kl(STUDENT, mixture)
    torch.testing.assert_close(DIVERGENCES["js"](TEACHER, STUDENT, weight), expected)


def test_the_limits_of_jensen_shannon() -> None:
    teacher, student = TEACHER.double(), STUDENT.double()
    near_forward = DIVERGENCES["js"](teacher, student, 1e-6) / 1e-6
    torch.testing.assert_close(near_forward, kl(teacher, student), rtol=1e-2, atol=1e-2)
    near_reverse = DIVERGENCES["js"](teacher, student, 1 - 1e-6) / 1e-6
    torch.testing.assert_close(near_reverse, kl(student, teacher), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_distributions_do_not_diverge(name: str) -> None:
    torch.testing.assert_close(DIVERGENCES[name](TEACHER, TEACHER, 0.3), torch.zeros(7))
    assert (DIVERGENCES[name](TEACHER, STUDENT, 0.3) > 0).all()


def test_the_other_tokens_are_one_outcome() -> None:
    ids = TEACHER.topk(4, dim=1).indices
    found = top_k_logprobs(STUDENT, ids)
    assert found.shape == (7, 5)
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(7))
    torch.testing.assert_close(found[:, :4], STUDENT.gather(1, ids))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_fewer_outcomes_diverge_less(name: str) -> None:
    """The data-processing inequality."""
    ids = TEACHER.topk(4, dim=1).indices
    few = DIVERGENCES[name](top_k_logprobs(TEACHER, ids), top_k_logprobs(STUDENT, ids), 0.5)
    assert (few <= DIVERGENCES[name](TEACHER, STUDENT, 0.5) + 1e-6).all() and (few > 0).all()
