"""From the responses of a run to eval.json: mean score, pass@k and maj@k of each data set."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from hpc_rl.algorithms.evaluation import CONFIDENCE, RESAMPLES, Estimate, estimate, maj_at_k, pass_at_k, sizes
from hpc_rl.config.rl.generate import EvalConfig
from hpc_rl.rewards.table import REWARDS
from hpc_rl.rl.generation.responses import FAILED, TRUNCATED, Row, read_responses
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import write_atomically, writing
from hpc_rl.tracking.evaluations import data_names

Extract = Callable[[str], str | None]
"""From a response to its answer; None if it has none."""


def evaluate_run(config: EvalConfig, run: RunDir) -> dict[str, Any]:
    """Write eval.json, and return it.

    Raises:
        RunError: it cannot be written, for example to a full disk.
    """
    names = data_names(config.data.files)
    rows, extract = list(read_responses(run.responses)), extraction(config.reward.function)
    found = {
        "model": config.model.path,
        "n": config.rollout.n,
        "temperature": config.rollout.temperature,
        "reward": " + ".join(filter(None, [config.environment.name, config.reward.described])),
        "weights": config.reward.weights,
        "correct": config.eval.correct,
        "interval": f"{CONFIDENCE:.0%}, percentile bootstrap over prompts, {RESAMPLES:,} resamples",
        "data": [
            {
                "file": name,
                "name": names[name],
                **evaluate(list(own), config.eval.correct, extract, config.trainer.seed),
            }
            for name, own in groupby(rows, key=lambda row: row["data"])
        ],
    }
    with writing(run.evaluation):
        write_atomically(run.evaluation, json.dumps(found, indent=1) + "\n")
    return found


def extraction(function: str | None) -> Extract | None:
    """Return what finds the answer in a response, if the reward function is a built-in one that has it."""
    if function not in REWARDS or not REWARDS[function].has_answers:
        return None
    extract: Extract = importlib.import_module(REWARDS[function].module).extract
    return extract


def evaluate(rows: Sequence[Row], correct: float, extract: Extract | None, seed: int) -> dict[str, Any]:
    """Return the metrics of one data set.

    Responses whose reward failed are left out, and counted. A prompt with fewer than k scored responses is left out of
    pass@k and maj@k.

    Args:
        rows: of responses.jsonl; the responses to a prompt are adjacent.
        correct: lowest score of a correct response.
        extract: finds the answer in a response; None: there is no maj@k.
        seed: of the bootstrap, and of the subsets of maj@k.
    """
    groups = [list(found) for _, found in groupby(rows, key=lambda row: row["index"])]
    scored = [[row for row in group if row["score"] is not None] for group in groups]
    rng = np.random.default_rng([seed])
    metrics: dict[str, Sequence[float]] = {"score": [float(np.mean(_scores(group))) for group in scored if group]}
    for k in sizes(max(map(len, groups))):
        enough = [group for group in scored if len(group) >= k]
        metrics[f"pass@{k}"] = [pass_at_k(len(group), sum(_correct(group, correct)), k) for group in enough]
        if extract is not None and k > 1:
            metrics[f"maj@{k}"] = [
                maj_at_k([extract(row["response"]) for row in group], _correct(group, correct), k, rng)
                for group in enough
            ]
    estimates: dict[str, Estimate] = {name: estimate(values, rng) for name, values in metrics.items() if len(values)}
    ends = [row["finish"] for row in rows if row["finish"] != FAILED]
    return {
        "prompts": len(groups),
        "responses": len(rows),
        "failed": len(rows) - sum(map(len, scored)),
        "truncated": sum(end == TRUNCATED for end in ends) / max(len(ends), 1),
        "mean_tokens": sum(row["tokens"] for row in rows) / len(rows),
        "metrics": {name: asdict(found) for name, found in estimates.items()},
    }


def _scores(group: Sequence[Row]) -> list[float]:
    return [row["score"] for row in group]


def _correct(group: Sequence[Row], threshold: float) -> list[bool]:
    return [score >= threshold for score in _scores(group)]
