from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_rl.rl.rollout.engine import Sampling
from hpc_rl.rl.rollout.sampling import TokenSampler, groups_of, sample, uniforms

PROBABILITIES = [0.05, 0.4, 0.0, 0.3, 0.15, 0.1]


def draw(sampling: Sampling, rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of each token, and its log-probability if it was drawn."""
    logits_BV = torch.tensor(PROBABILITIES).log().add(3.0).repeat(rows, 1)
    uniform_B = torch.linspace(0, 1 - 2**-24, rows)
    token_B, logprob_B = sample(logits_BV, uniform_B, sampling, torch.empty_like(logits_BV))
    share_V = np.bincount(token_B.numpy(), minlength=len(PROBABILITIES)) / rows
    logprob_V = np.full(len(PROBABILITIES), -np.inf)
    logprob_V[token_B.numpy()] = logprob_B.numpy()
    return share_V, logprob_V


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), PROBABILITIES),
        (Sampling(1, temperature=0), [0, 1, 0, 0, 0, 0]),
        (Sampling(1, temperature=0.5), [p**2 / 0.285 for p in PROBABILITIES]),
        (Sampling(1, top_k=2), [0, 4 / 7, 0, 3 / 7, 0, 0]),
        (Sampling(1, top_k=1), [0, 1, 0, 0, 0, 0]),
        (Sampling(1, top_k=100), PROBABILITIES),
        (Sampling(1, top_p=0.72), [0, 8 / 17, 0, 6 / 17, 3 / 17, 0]),
        (Sampling(1, top_p=0.01), [0, 1, 0, 0, 0, 0]),
        (Sampling(1, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7, 0, 0]),
    ],
    ids=str,
)
def test_shares(sampling: Sampling, expected: list[float]) -> None:
    share_V, logprob_V = draw(sampling)
    np.testing.assert_allclose(share_V, expected, atol=1e-3)
    # Log-probabilities depend on the temperature, but not on top_k and top_p.
    probabilities = np.array(PROBABILITIES) ** (1 / (sampling.temperature or 1))
    drawn = share_V > 0
    np.testing.assert_allclose(logprob_V[drawn], np.log((probabilities / probabilities.sum())[drawn]), atol=1e-6)


def test_log_probabilities_can_be_those_of_the_truncated_distribution() -> None:
    share_V, logprob_V = draw(Sampling(1, top_p=0.72, truncated_logprobs=True))
    np.testing.assert_allclose(np.exp(logprob_V), share_V, atol=2e-3)
    np.testing.assert_allclose(np.exp(logprob_V), [0, 8 / 17, 0, 6 / 17, 3 / 17, 0], atol=1e-6)


def test_each_row_gets_its_own_token() -> None:
    logits_BV = torch.tensor([[0.0, -50.0, -50.0], [-50.0, 0.0, 0.0], [-50.0, 0.0, 0.0]])
    uniform_B = torch.tensor([0.999, 0.499, 0.501])
    for sampling in (Sampling(1), Sampling(1, top_k=3)):
        token_B, _ = sample(logits_BV.clone(), uniform_B, sampling, torch.empty_like(logits_BV))
        assert token_B.tolist() == [0, 1, 2]


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    """Not even if the largest uniform number times the total is rounded up to the total."""
    logits_BV = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0))
    logits_BV[:, -1] = -torch.inf
    uniform_B = torch.full((2000,), 1 - 2**-24)
    for sampling in (Sampling(1), Sampling(1, top_k=50)):
        _, logprob_B = sample(logits_BV.clone(), uniform_B, sampling, torch.empty_like(logits_BV))
        assert torch.isfinite(logprob_B).all()


def test_uniforms_belong_to_seed_and_step() -> None:
    long, short = uniforms([5, 6, 2**60], 40), uniforms([2**60], 10)
    assert long.shape == (3, 40) and long.dtype == np.float32
    np.testing.assert_array_equal(long[2, :10], short[0])
    assert len(np.unique(long)) == long.size
    assert long.min() >= 0 and long.max() < 1


def test_rows_are_grouped_by_what_matters_for_a_token() -> None:
    samplings = [Sampling(3), Sampling(4, temperature=0), Sampling(9), Sampling(5, temperature=0), Sampling(3, top_k=2)]
    groups = groups_of(samplings, torch.device("cpu"))
    assert [sorted(group.rows_G.tolist()) for group in groups] == [[0, 2], [1, 3], [4]]
    assert [(group.sampling.temperature, group.sampling.top_k) for group in groups] == [(1, 0), (0, 0), (1, 2)]
    assert len(groups_of([Sampling(3), Sampling(9)], torch.device("cpu"))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_is_sampled_in_its_own_way(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_VH, hidden_BH = (torch.randn(n, 8, generator=generator).to(dtype) for n in (50, 6))
    uniform_B = torch.rand(6, generator=generator)
    samplings = [Sampling(1, temperature=0), Sampling(1, 0.5), Sampling(1, top_k=3)] * 2
    sampler = TokenSampler(weight_VH, 8)
    token_B, logprob_B = sampler(hidden_BH, uniform_B, groups_of(samplings, torch.device("cpu")))
    for row, sampling in enumerate(samplings):
        alone = groups_of([sampling] * 6, torch.device("cpu"))
        expected_B, expected_logprob_B = sampler(hidden_BH, uniform_B, alone)
        assert token_B[row] == expected_B[row]
        torch.testing.assert_close(logprob_B[row], expected_logprob_B[row])
