"""Scores of a batch of responses, by whatever reward.* names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.ppo import RewardConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rewards.check import check_function, check_url
from hpc_rl.rewards.http import Endpoint
from hpc_rl.rewards.pool import Pool
from hpc_rl.rewards.worker import Result, failed

# Not worth a process: they take microseconds and cannot hang.
_INLINE = ("exact", "gsm8k")
_SHOWN = 5  # failures of one batch that are logged each


@dataclass(frozen=True)
class Scores:
    values: NDArray[np.float32]
    """[B], finite; reward.on_error where scoring failed."""
    errors: list[tuple[int, str]]
    """Index and reason of each that failed."""


class Scorer(Protocol):
    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        """Score each response to its prompt; both have length B. What fails is logged and counted, never raised."""
        ...

    def close(self) -> None:
        """End the processes or threads that scored."""
        ...


def open_scorer(config: RewardConfig) -> Scorer:
    """The scorer of reward.function or reward.url; reward.model is no matter of this package.

    Raises:
        UserError: the function cannot be loaded, or the URL is none.
    """
    if config.function in _INLINE:
        check_function(config.function, config.kwargs, same_python=False)
        return InlineScorer(config)
    if config.function is not None:
        return ProcessScorer(config, config.function)
    if config.url is not None:
        check_url(config.url)
        return HttpScorer(config, config.url)
    raise ValueError("neither a reward function nor a URL")


class InlineScorer:
    """Built-in functions that are called where the batch is."""

    def __init__(self, config: RewardConfig) -> None:
        self._on_error = config.on_error
        self._function = importlib.import_module(f"hpc_rl.rewards.{config.function}").score

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        results = [self._result(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return to_scores(results, responses, self._on_error)

    def close(self) -> None:
        pass

    def _result(self, prompt: Prompt, response: str) -> Result:
        try:
            return self._function(response, prompt.answer), None
        except ValueError as error:
            return failed(str(error))


class ProcessScorer:
    """Functions that may do anything: in processes, with a time limit for each call."""

    def __init__(self, config: RewardConfig, function: str) -> None:
        self._on_error = config.on_error
        self._pool = Pool(function, config.kwargs, config.workers, config.timeout_s)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        calls = []
        for prompt, response in zip(prompts, responses, strict=True):
            given = {"row": prompt.row, "prompt": prompt.text}
            calls.append((response, prompt.answer, {name: given[name] for name in self._pool.extras}))
        return to_scores(self._pool.results(calls), responses, self._on_error)

    def close(self) -> None:
        self._pool.close()


class HttpScorer:
    """An HTTP endpoint."""

    def __init__(self, config: RewardConfig, url: str) -> None:
        self._on_error = config.on_error
        self._kwargs = config.kwargs
        self._endpoint = Endpoint(url, config.timeout_s, config.workers)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Scores:
        bodies = [
            {**self._kwargs, "prompt": prompt.text, "response": response, "answer": prompt.answer}
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return to_scores(self._endpoint.results(bodies), responses, self._on_error)

    def close(self) -> None:
        self._endpoint.close()


def to_scores(results: Sequence[Result], responses: Sequence[str], on_error: float) -> Scores:
    """Put on_error where there is no score, and log these with the beginning of the response."""
    values = np.array([value if error is None else on_error for value, error in results], dtype=np.float32)
    errors = [(index, error) for index, (_, error) in enumerate(results) if error is not None]
    for index, error in errors[:_SHOWN]:
        _warn(f"no reward, scored {on_error:g}: {error}; response: {responses[index][:80]!r}")
    if len(errors) > _SHOWN:
        _warn(f"no reward for {len(errors) - _SHOWN:,} more of these {len(results):,} responses")
    return Scores(values, errors)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
