from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.algorithms import losses
from hpc_rl.algorithms.aggregation import LOSS_AGGREGATIONS, MiniBatchTotals
from hpc_rl.algorithms.losses import Clip, PolicyBatch, PolicyLoss
from hpc_rl.algorithms.policy_losses import POLICY_LOSSES
from hpc_rl.config.rl.algorithm import AlgorithmConfig
from tests.algorithms import reference
from tests.algorithms.batches import flat, lengths, lengths_of, numbers, rows, tokens, weighted_sum

MODES = tuple(LOSS_AGGREGATIONS)
# Steps of 0.13 put no ratio and no value exactly on a bound, where float32 and float64 may round to different sides.
logs = st.integers(-8, 8).map(lambda n: 0.13 * n - 2.0)
quarters = st.integers(-12, 12).map(lambda n: n / 4)
OLD = -2.0


def batch(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    lengths_B: torch.Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> PolicyBatch:
    """Only GSPO reads the lengths."""
    lengths_B = torch.zeros(0, dtype=torch.int64) if lengths_B is None else lengths_B
    return PolicyBatch(logprobs, old, advantages, lengths_B, Clip(clip_low, clip_high, clip_c))


def response_weights(
    lengths_B: torch.Tensor, mode: str, max_length: int, total_tokens: int, total_responses: int
) -> torch.Tensor:
    return LOSS_AGGREGATIONS[mode](lengths_B, MiniBatchTotals(total_tokens, total_responses, max_length))


def with_gradient(loss_N: torch.Tensor, of: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss_N.sum(), of)[0].tolist()


def ppo_of(log_ratio: float, advantage: float, c: float | None = 3.0) -> tuple[float, float, float]:
    """Loss, gradient and clip flag of one token, clipped at 0.8 and 1.5."""
    logprobs = torch.tensor([OLD + log_ratio], requires_grad=True)
    result = losses.ppo(
        batch(logprobs, torch.tensor([OLD]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.5, clip_c=c)
    )
    return result.loss_N.item(), with_gradient(result.loss_N, logprobs)[0], result.clipped_N.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, (-2.0, -2.0, 0)),  # on policy: the policy gradient itself, -A
        (1.4, 2.0, (-2.8, -2.8, 0)),  # -1.4 * 2, within the bounds
        (1.6, 2.0, (-3.0, 0.0, 1)),  # gone up enough: -1.5 * 2
        (0.5, 2.0, (-1.0, -1.0, 0)),  # down though it was good: free to come back, -0.5 * 2
        (0.5, -2.0, (1.6, 0.0, 1)),  # gone down enough: 0.8 * 2
        (0.9, -2.0, (1.8, 1.8, 0)),  # 0.9 * 2, within the bounds
        (1.6, -2.0, (3.2, 3.2, 0)),  # up though it was bad: free to come back, 1.6 * 2
        (4.0, -2.0, (6.0, 0.0, 1)),  # so far up that the dual clip holds it: 3 * 2
        (4.0, 2.0, (-3.0, 0.0, 1)),  # the dual clip does not affect good tokens: -1.5 * 2
    ],
)
def test_ppo_by_hand(ratio: float, advantage: float, expected: tuple[float, float, float]) -> None:
    assert ppo_of(math.log(ratio), advantage) == pytest.approx(expected, abs=1e-5)


def test_without_dual_clip_a_bad_token_is_unbounded() -> None:
    assert ppo_of(math.log(4.0), -2.0, c=None) == pytest.approx((8.0, 8.0, 0), abs=1e-5)  # 4 * 2


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    assert all(map(math.isfinite, ppo_of(log_ratio, advantage, c=None)))


@given(st.data(), lengths, st.none() | st.just(1.6))
def test_ppo_equals_its_cases(data: st.DataObject, lengths: list[int], c: float | None) -> None:
    new, old, advantages = (data.draw(rows(of, lengths)) for of in (logs, logs, quarters))
    logprobs = flat(new).requires_grad_()
    result = losses.ppo(batch(logprobs, flat(old), flat(advantages), clip_low=0.2, clip_high=0.28, clip_c=c))
    expected = [reference.ppo_token(n, o, a, 0.2, 0.28, c) for n, o, a in tokens(new, old, advantages)]
    compare(result, logprobs, expected)
    torch.testing.assert_close(result.kl_N, flat(old) - flat(new), atol=1e-6, rtol=1e-5)
    assert not result.kl_N.requires_grad


def compare(result: PolicyLoss, logprobs: torch.Tensor, expected: list[tuple[float, float, bool]]) -> None:
    wanted_loss, wanted_gradient, wanted_clipped = zip(*expected, strict=True)
    assert result.loss_N.tolist() == pytest.approx(wanted_loss, abs=1e-4)
    assert with_gradient(result.loss_N, logprobs) == pytest.approx(wanted_gradient, abs=1e-4)
    assert result.clipped_N.tolist() == list(wanted_clipped)


def test_gspo_by_hand() -> None:
    # Response 1: log ratios 0.1 and 0.3, ratio e^0.2. Response 2: one token, log ratio -0.5, below 0.8, A < 0: clipped.
    logprobs = torch.tensor([-1.0, -2.0, -1.5], requires_grad=True)
    old = torch.tensor([-1.1, -2.3, -1.0])
    result = losses.gspo(
        batch(logprobs, old, torch.tensor([2.0, 2.0, -1.0]), torch.tensor([2, 1]), clip_low=0.2, clip_high=0.5)
    )
    s = math.exp(0.2)
    assert result.loss_N.tolist() == pytest.approx([-2 * s, -2 * s, 0.8])
    assert with_gradient(result.loss_N, logprobs) == pytest.approx([-2 * s, -2 * s, 0.0])
    assert result.clipped_N.tolist() == [0.0, 0.0, 1.0]
    assert result.kl_N.tolist() == pytest.approx([-0.1, -0.3, 0.5])


@given(st.data(), lengths, st.sampled_from([(0.2, 0.28), (0.9999, 1e6)]))
def test_gspo_equals_the_sequence_form(data: st.DataObject, lengths: list[int], bounds: tuple[float, float]) -> None:
    new, old = data.draw(rows(logs, lengths)), data.draw(rows(logs, lengths))
    advantages = [data.draw(quarters) for _ in lengths]
    logprobs, lengths_B = flat(new).requires_grad_(), lengths_of(new)
    result = losses.gspo(
        batch(
            logprobs,
            flat(old),
            torch.tensor(advantages).repeat_interleave(lengths_B),
            lengths_B,
            clip_low=bounds[0],
            clip_high=bounds[1],
        )
    )
    weights = response_weights(lengths_B, "seq-mean-token-mean", 99, sum(lengths), len(lengths))
    loss = weighted_sum(result.loss_N, weights, lengths_B)
    expected, gradient = reference.gspo_sequence(new, old, advantages, *bounds)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], flat(gradient), atol=1e-4, rtol=1e-4)


def test_gspo_keeps_ratios_near_1_apart() -> None:
    # Bounds are about 3e-4 here, and around -90 float32 has steps of 2^-17: the mean of 2^-14 / 3 lies between two.
    logprobs = torch.full((3,), -90.0)
    old = logprobs - torch.tensor([0.0, 0.0, 2**-14])
    result = losses.gspo(batch(logprobs, old, torch.ones(3), torch.tensor([3]), clip_low=3e-4, clip_high=4e-4))
    assert (-result.loss_N - 1).tolist() == pytest.approx([2**-14 / 3] * 3, rel=1e-2)


def test_cispo_by_hand() -> None:
    # Weights: e^0.1; 1.5, held from e^1; 0.8, held from e^-1. Loss -weight * A * log-probability, gradient -weight * A.
    logprobs = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    result = losses.cispo(
        batch(logprobs, torch.tensor([-1.1, -2.0, -2.0]), torch.tensor([1.0, 2.0, -1.0]), clip_low=0.2, clip_high=0.5)
    )
    assert result.loss_N.tolist() == pytest.approx([math.exp(0.1), 3.0, -2.4])
    assert with_gradient(result.loss_N, logprobs) == pytest.approx([-math.exp(0.1), -3.0, 0.8])
    assert result.clipped_N.tolist() == [0.0, 1.0, 1.0]
    assert result.kl_N.tolist() == pytest.approx([-0.1, -1.0, 1.0])


@given(st.data(), lengths)
def test_cispo_equals_its_cases(data: st.DataObject, lengths: list[int]) -> None:
    new, old, advantages = (data.draw(rows(of, lengths)) for of in (logs, logs, quarters))
    logprobs = flat(new).requires_grad_()
    result = losses.cispo(batch(logprobs, flat(old), flat(advantages), clip_low=0.2, clip_high=0.28))
    expected = [reference.cispo_token(n, o, a, 0.2, 0.28) for n, o, a in tokens(new, old, advantages)]
    compare(result, logprobs, expected)


def test_every_configured_name_has_a_loss() -> None:
    assert list(POLICY_LOSSES) == list(get_args(AlgorithmConfig.model_fields["loss"].annotation))
    assert get_args(AlgorithmConfig.model_fields["loss_agg"].annotation) == MODES


def test_the_table_hands_on_every_bound() -> None:
    new, old = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -2.0, 0.0])  # ratios e^2, e, 1/e
    advantages, lengths = torch.tensor([-1.0, 1.0, -1.0]), torch.tensor([1, 1, 1])
    clip = Clip(low=0.2, high=0.5, c=4.0)
    by_name = {
        name: loss(PolicyBatch(new, old, advantages, lengths, clip)).loss_N.tolist()
        for name, loss in POLICY_LOSSES.items()
    }
    assert by_name["ppo"] == pytest.approx([4.0, -1.5, 0.8])
    assert by_name["gspo"] == pytest.approx([math.exp(2), -1.5, 0.8])
    assert by_name["cispo"] == pytest.approx([-1.5, 1.5, -0.8])


def test_weights_by_hand() -> None:
    # 10 tokens and 4 responses in the whole mini-batch, of which 2 responses are here; at most 5 tokens each.
    lengths_B = torch.tensor([1, 4])
    expected = {
        "token-mean": [1 / 10, 1 / 10],
        "seq-mean-token-mean": [1 / 4, 1 / 16],
        "seq-mean-token-sum": [1 / 4, 1 / 4],
        "seq-mean-token-sum-norm": [1 / 20, 1 / 20],
    }
    for mode in MODES:
        assert response_weights(lengths_B, mode, 5, 10, 4).tolist() == pytest.approx(expected[mode])
    # 1 * 1/4 + (2 + 3 + 4 + 5) * 1/16
    weights_B = response_weights(lengths_B, "seq-mean-token-mean", 5, 10, 4)
    assert weighted_sum(torch.arange(1.0, 6.0), weights_B, lengths_B).item() == 1.125


@given(st.data(), lengths, st.sampled_from(MODES))
def test_aggregation_equals_its_definition(data: st.DataObject, lengths: list[int], mode: str) -> None:
    values = data.draw(rows(numbers, lengths))
    weights_B = response_weights(lengths_of(values), mode, 9, sum(lengths), len(lengths))
    got = weighted_sum(flat(values), weights_B, lengths_of(values)).item()
    assert got == pytest.approx(reference.aggregate(values, mode, 9), abs=1e-5)


@given(st.data(), lengths, st.sampled_from(MODES), st.sampled_from(sorted(POLICY_LOSSES)))
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    data: st.DataObject, lengths: list[int], mode: str, name: str
) -> None:
    new, old, advantages = (data.draw(rows(of, lengths)) for of in (logs, logs, quarters))
    homes = [data.draw(st.integers(0, 2), label="micro-batch") for _ in lengths]

    def run(parts: list[list[int]]) -> tuple[float, torch.Tensor]:
        leaves = [torch.tensor(row, requires_grad=True) for row in new]
        total = torch.zeros(())
        for part in parts:
            here = torch.cat([torch.zeros(0), *(leaves[i] for i in part)])
            there, gain = flat([old[i] for i in part]), flat([advantages[i] for i in part])
            lengths_b = torch.tensor([lengths[i] for i in part], dtype=torch.int64)
            weights = response_weights(lengths_b, mode, 9, sum(lengths), len(lengths))
            loss_N = POLICY_LOSSES[name](PolicyBatch(here, there, gain, lengths_b, Clip(0.2, 0.28, 1.6))).loss_N
            total = total + weighted_sum(loss_N, weights, lengths_b)
        return total.item(), torch.cat(torch.autograd.grad(total, leaves))

    whole, whole_gradient = run([list(range(len(lengths)))])
    split, split_gradient = run([[i for i, home in enumerate(homes) if home == part] for part in range(3)])
    assert split == pytest.approx(whole, abs=1e-5)
    torch.testing.assert_close(split_gradient, whole_gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_tokens_give_zero_that_can_be_differentiated(name: str) -> None:
    none, no_lengths = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    leaf = torch.ones(3, requires_grad=True)
    loss_N = POLICY_LOSSES[name](PolicyBatch(leaf[:0], none, none, no_lengths, Clip(0.2, 0.2, 3.0))).loss_N
    total = weighted_sum(loss_N, response_weights(no_lengths, "seq-mean-token-mean", 9, 10, 2), no_lengths)
    total.backward()
    assert total.item() == 0
    assert leaf.grad is not None and leaf.grad.eq(0).all()


def test_value_by_hand() -> None:
    # Old value 0, clip 0.5. At 2, target 3: held at 0.5, error 2.5 over 1: 2.5^2 / 2, no gradient. At 2, target 1: held
    # at 0.5, error 0.5, below 1: 1 / 2. At 0.25, target 1: not held, 0.75^2 / 2.
    values = torch.tensor([2.0, 2.0, 0.25], requires_grad=True)
    returns = torch.tensor([3.0, 1.0, 1.0])
    result = losses.value(values, torch.zeros(3), returns, clip=0.5)
    assert result.loss_N.tolist() == [3.125, 0.5, 0.28125]
    assert with_gradient(result.loss_N, values) == [0.0, 1.0, -0.75]
    assert result.clipped_N.tolist() == [1.0, 0.0, 0.0]
    free = losses.value(values, torch.zeros(3), returns, clip=None)
    assert free.loss_N.tolist() == [0.5, 0.5, 0.28125]
    assert free.clipped_N.tolist() == [0.0, 0.0, 0.0]


@given(st.data(), lengths, st.none() | st.just(0.3))
def test_value_equals_its_cases(data: st.DataObject, lengths: list[int], clip: float | None) -> None:
    new, old = data.draw(rows(logs, lengths)), data.draw(rows(logs, lengths))
    # Off the grid of values and bounds, so that the two errors are never equal.
    returns = data.draw(rows(logs.map(lambda number: number + 0.031), lengths))
    values = flat(new).requires_grad_()
    result = losses.value(values, flat(old), flat(returns), clip)
    expected = [reference.value_token(n, o, r, clip) for n, o, r in tokens(new, old, returns)]
    compare(PolicyLoss(result.loss_N, result.clipped_N, result.loss_N), values, expected)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 2.0, 4.0])  # variance 8/3
    assert losses.explained_variance(returns, returns) == 1.0
    assert losses.explained_variance(torch.full((3,), 7.0), returns) == 0.0
    # Errors 0, 1, 2: variance 2/3, a quarter of 8/3.
    assert losses.explained_variance(torch.tensor([0.0, 1.0, 2.0]), returns) == pytest.approx(0.75)
    assert losses.explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert math.isnan(losses.explained_variance(returns, torch.full((3,), 0.1)))
