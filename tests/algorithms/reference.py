"""The formulas once more, from their papers, as plain loops over lists of numbers: slow, and without torch.

A batch is a list of responses, a response a list of tokens, and there is no padding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

Rows = list[list[float]]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """By the definition: each token sums (gamma lam)^k times the error k tokens later."""
    advantages = []
    for reward, value in zip(rewards, values, strict=True):
        following = [*value[1:], 0.0]
        errors = [r + gamma * after - v for r, after, v in zip(reward, following, value, strict=True)]
        advantages.append(
            [sum((gamma * lam) ** k * error for k, error in enumerate(errors[token:])) for token in range(len(errors))]
        )
    returns = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(advantages, values, strict=True)]
    return advantages, returns


def whiten(rows: Rows) -> Rows:
    tokens = [number for row in rows for number in row]
    mean, variance = statistics.fmean(tokens), statistics.pvariance(tokens)
    return [[(number - mean) / (variance + 1e-8) ** 0.5 for number in row] for row in rows]


def rewards_to_come(rewards: Rows, gamma: float) -> Rows:
    return [
        [sum(gamma**k * reward for k, reward in enumerate(row[token:])) for token in range(len(row))] for row in rewards
    ]


def _group(scores: list[float], groups: list[int], of: int) -> list[float]:
    return [score for score, group in zip(scores, groups, strict=True) if group == groups[of]]


def grpo(scores: list[float], groups: list[int]) -> list[float]:
    result = []
    for place, score in enumerate(scores):
        group = _group(scores, groups, place)
        deviation = statistics.stdev(group) if len(group) > 1 else 0.0
        result.append((score - statistics.fmean(group)) / (deviation + 1e-6))
    return result


def dr_grpo(scores: list[float], groups: list[int]) -> list[float]:
    return [score - statistics.fmean(_group(scores, groups, place)) for place, score in enumerate(scores)]


def rloo(scores: list[float], groups: list[int]) -> list[float]:
    result = []
    for place, score in enumerate(scores):
        others = [scores[i] for i in range(len(scores)) if groups[i] == groups[place] and i != place]
        result.append(score - statistics.fmean(others))
    return result


def informative(scores: list[float], groups: list[int]) -> list[bool]:
    return [len(set(_group(scores, groups, place))) > 1 for place in range(len(scores))]


def overlong(length: int, max_length: int, buffer: int, penalty: float) -> float:
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return penalty * ((max_length - buffer) - length) / buffer
    return -penalty


def ppo_token(
    logprob: float, old: float, advantage: float, low: float, high: float, c: float | None
) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-probability, and whether a clip is in force: case by case."""
    ratio = math.exp(logprob - old)
    if advantage >= 0 and ratio > 1 + high:
        return -advantage * (1 + high), 0.0, advantage > 0
    if advantage < 0 and ratio < 1 - low:
        return -advantage * (1 - low), 0.0, True
    if advantage < 0 and c is not None and ratio > c:
        return -advantage * c, 0.0, True
    return -advantage * ratio, -advantage * ratio, False


def gspo_sequence(logprobs: Rows, olds: Rows, advantages: list[float], low: float, high: float) -> tuple[float, Rows]:
    """The sequence form: the mean over responses of -min(s A, clip(s) A), and its gradient."""
    loss, gradient = 0.0, []
    for new, old, advantage in zip(logprobs, olds, advantages, strict=True):
        mean = sum(n - o for n, o in zip(new, old, strict=True)) / len(new)
        value, slope, _ = ppo_token(mean, 0.0, advantage, low, high, None)
        loss += value / len(logprobs)
        gradient.append([slope / len(new) / len(logprobs)] * len(new))
    return loss, gradient


def cispo_token(logprob: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    ratio = math.exp(logprob - old)
    weight = 1 + high if ratio > 1 + high else 1 - low if ratio < 1 - low else ratio
    return -weight * advantage * logprob, -weight * advantage, weight != ratio


def value_token(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    """Loss, its derivative by the value, and whether the clip is in force."""
    error = value - target
    if clip is None or abs(value - old) <= clip:
        return error**2 / 2, error, False
    held = old + clip if value > old else old - clip
    if abs(held - target) > abs(error):
        return (held - target) ** 2 / 2, 0.0, True
    return error**2 / 2, error, False


def aggregate(losses: Rows, mode: str, max_length: int) -> float:
    if mode == "token-mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    per_response: dict[str, Callable[[list[float]], float]] = {
        "seq-mean-token-mean": statistics.fmean,
        "seq-mean-token-sum": sum,
        "seq-mean-token-sum-norm": lambda row: sum(row) / max_length,
    }
    return statistics.fmean(per_response[mode](row) for row in losses)
