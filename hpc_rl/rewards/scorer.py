"""Scores of a batch of responses, from a reward function or an endpoint."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rewards.check import check_function, check_url
from hpc_rl.rewards.http import RewardClient
from hpc_rl.rewards.processes import RewardProcesses
from hpc_rl.rewards.table import REWARDS
from hpc_rl.rewards.worker import Call, Result, failed, succeeded

_SHOWN = 5
"""Number of failures of one batch that are logged separately."""


@dataclass(frozen=True)
class Scores:
    """The scores of B responses."""

    values: NDArray[np.float32]
    """[B]. If scoring failed: reward.on_error, or NaN if that is null. All others are finite, within reward.clip."""
    errors: list[tuple[int, str]]
    """Index and reason of each failure."""
    components: Sequence[Mapping[str, float]] = ()
    """Further numbers that the reward reported for each response; empty if no response has any."""

    def component_means(self) -> dict[str, float]:
        """Return the mean of each component over the responses that have it."""
        found: dict[str, list[float]] = {}
        for components in self.components:
            for name, value in components.items():
                found.setdefault(name, []).append(value)
        return {name: float(np.mean(values)) for name, values in sorted(found.items())}


class Scorer(Protocol):
    """A source of scores."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        """Score responses[i] as an answer to prompts[i]. Failures are logged and counted, and never raised."""

    def close(self) -> None:
        """End the processes or threads that score."""


def open_scorer(config: OptionalRewardConfig) -> Scorer:
    """Open the scorer of reward.function, reward.functions or reward.url. A reward model is not scored by this package.

    Raises:
        UserError: the function cannot be loaded, or the URL is invalid.
    """
    if config.function is not None and _in_driver(config.function):
        return InDriverScorer(config, config.function)
    if config.function is not None:
        return ProcessScorer(config, config.function)
    if config.functions:
        return WeightedScorer(config)
    if config.url is not None:
        check_url(config.url)
        return HttpScorer(config, config.url)
    raise ValueError("reward.function, reward.functions and reward.url are all unset")


class InDriverScorer:
    """Calls a built-in function in this process."""

    def __init__(self, config: OptionalRewardConfig, function: str) -> None:
        check_function(function, config.kwargs, same_python=False)
        self._config = config
        self._function = importlib.import_module(REWARDS[function].module).score

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        results = [self._result(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return to_scores(results, responses, self._config)

    def close(self) -> None:
        """End nothing: there are no processes or threads."""

    def _result(self, prompt: Prompt, response: str) -> Result:
        heart.beat()
        try:
            return succeeded(self._function(response, prompt.answer))
        except ValueError as error:
            return failed(str(error))


class ProcessScorer:
    """Calls any function in separate processes, with a time limit for each call."""

    def __init__(self, config: OptionalRewardConfig, function: str) -> None:
        self._config = config
        self._processes = RewardProcesses([(function, config.kwargs)], config.workers, config.timeout_s)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        (results,) = _of_each_function(self._processes, prompts, responses)
        return to_scores(results, responses, self._config)

    def close(self) -> None:
        self._processes.close()


class HttpScorer:
    """Requests scores from an HTTP endpoint."""

    def __init__(self, config: OptionalRewardConfig, url: str) -> None:
        self._config = config
        self._kwargs = config.kwargs
        self._endpoint = RewardClient(url, config.timeout_s, config.workers)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        bodies = [
            {**self._kwargs, "prompt": prompt.text, "response": response, "answer": prompt.answer}
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return to_scores(self._endpoint.results(bodies), responses, self._config)

    def close(self) -> None:
        self._endpoint.close()


class WeightedScorer:
    """Adds the weighted scores of several functions. A response for which one of them fails has reward.on_error.

    All calls of all functions share reward.workers processes, each of which has loaded all functions. Built-in
    functions that take microseconds run in this process.
    """

    def __init__(self, config: OptionalRewardConfig) -> None:
        self._config = config
        self._weights = config.weights or [1.0] * len(config.functions)
        alone = {name: config.alone(name) for name in config.functions}
        self._here = {name: InDriverScorer(own, name) for name, own in alone.items() if _in_driver(name)}
        self._elsewhere = {name: own for name, own in alone.items() if not _in_driver(name)}
        functions = [(name, own.kwargs) for name, own in self._elsewhere.items()]
        self._processes = RewardProcesses(functions, config.workers, config.timeout_s) if functions else None

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        """Score each response by all functions. The score of each of them is a component with its name."""
        found = {name: scorer.score(prompts, responses) for name, scorer in self._here.items()}
        if self._processes is not None:
            results = _of_each_function(self._processes, prompts, responses)
            for (name, own), each in zip(self._elsewhere.items(), results, strict=True):
                found[name] = to_scores(each, responses, own)
        return weighted_sum({name: found[name] for name in self._config.functions}, self._weights, self._config)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


def _in_driver(function: str) -> bool:
    return function in REWARDS and REWARDS[function].in_driver


def _of_each_function(
    processes: RewardProcesses, prompts: Sequence[Prompt], responses: Sequence[str]
) -> list[list[Result]]:
    """Call every function of the processes for every response. Return each function's results, in order."""
    calls: list[Call] = []
    for prompt, response in zip(prompts, responses, strict=True):
        known = {"row": prompt.row, "prompt": prompt.text}
        for number, extras in enumerate(processes.extras):
            calls.append((number, response, prompt.answer, {name: known[name] for name in extras}))
    results, functions = processes.results(calls), len(processes.extras)
    return [results[number::functions] for number in range(functions)]


def weighted_sum(scores: Mapping[str, Scores], weights: Sequence[float], config: OptionalRewardConfig) -> Scores:
    """Return sum_k weight_k * score_k for each response, as `final_values`.

    Args:
        scores: those of each function. The numbers become components: NAME, except where it failed, and NAME/KEY for
            the function's own.
    """
    table_KB = np.stack([_without_failures(each) for each in scores.values()])
    total_B = (np.array(weights)[:, None] * table_KB).sum(axis=0).astype(np.float32)
    errors: dict[int, str] = {}
    components: list[dict[str, float]] = [{} for _ in total_B]
    for (name, each), values_B in zip(scores.items(), table_KB.tolist(), strict=True):
        for index, reason in each.errors:
            errors.setdefault(index, f"{name}: {reason}")
        for index, value in enumerate(values_B):
            if not math.isnan(value):
                components[index][name] = value
        for index, own in enumerate(each.components):
            components[index] |= {f"{name}/{key}": value for key, value in own.items()}
    return Scores(final_values(total_B, config), sorted(errors.items()), components)


def _without_failures(scores: Scores) -> NDArray[np.float32]:
    """Return [B]: the scores, NaN where scoring failed."""
    values = scores.values.copy()
    values[[index for index, _ in scores.errors]] = math.nan
    return values


def to_scores(results: Sequence[Result], responses: Sequence[str], config: OptionalRewardConfig) -> Scores:
    """Collect results as `final_values` of their scores, and log failures with the start of the response."""
    then = "the response is left out" if config.on_error is None else f"the score is {config.on_error:g}"
    scores = np.array([result.score if result.error is None else math.nan for result in results], dtype=np.float32)
    errors = [(index, result.error) for index, result in enumerate(results) if result.error is not None]
    for index, error in errors[:_SHOWN]:
        _warn(f"scoring failed, {then}: {error}; response: {responses[index][:80]!r}")
    if len(errors) > _SHOWN:
        _warn(f"scoring failed for {len(errors) - _SHOWN:,} more of these {len(results):,} responses")
    components = [result.components for result in results]
    return Scores(final_values(scores, config), errors, components if any(components) else ())


def final_values(scores: NDArray[np.float32], config: OptionalRewardConfig) -> NDArray[np.float32]:
    """Return the scores limited to reward.clip, and reward.on_error (if it is not null) for those that are NaN."""
    limited = scores if config.clip is None else scores.clip(*config.clip)
    return limited if config.on_error is None else np.where(np.isnan(limited), np.float32(config.on_error), limited)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
