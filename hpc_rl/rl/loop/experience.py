"""One step's responses as a TensorDict, from generation to the last update.

A response with several turns also has observations: tokens that the policy did not sample, such as the output of a tool
or the next message of the user. They are context for the tokens after them, and nothing else. Only response_ids and
response_mask have them. In the other columns, each turn of the policy directly follows its turn before, so that losses,
means, discounts and lengths count sampled tokens only.

B responses; jagged columns have no padding. Those marked "tokens" have one number per token that the policy sampled:

    prompt_ids       jagged   int32    [B, P]
    response_ids     jagged   int32    [B, R], including observations and the end-of-sequence token
    response_mask    jagged   bool     [B, R], whether the policy sampled the token; absent if there are no observations
    group            [B]      int64    which prompt of the step a response answers
    finished         [B]      bool     false if the response was cut at the length limit
    rollout_logprobs tokens   float32  from the engine that sampled, at rollout.temperature
    scores           [B]      float32  the reward of the whole response, including penalties; 0 if it has none
    scored           [B]      bool     whether the response has a score; the others teach nothing
    old_logprobs     tokens   float32  under the policy before the step's first update
    ref_logprobs     tokens   float32  under the reference
    teacher_logprobs tokens   float32  under the teacher
    values           tokens   float32  the critic's value of the state before each token
    rewards          tokens   float32  score at the last token, minus the KL penalty if it is part of the reward
    advantages       tokens   float32
    returns          tokens   float32  the critic's targets
    weights          tokens   float32  weight of each token's loss in its mini-batch's loss; sums over ranks

The loop adds columns as it computes them. Columns that an algorithm does not need are never added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.algorithms.advantages import opd, overlong_penalty, to_tokens, token_rewards, total_of_each
from hpc_rl.algorithms.aggregation import LOSS_AGGREGATIONS, MiniBatchTotals
from hpc_rl.algorithms.correction import correction_weights, importance_ratios
from hpc_rl.algorithms.estimator_interface import AdvantageInputs
from hpc_rl.algorithms.estimators import ESTIMATORS
from hpc_rl.algorithms.kl import KL_ESTIMATORS
from hpc_rl.config.rl.algorithm import AlgorithmConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.loop.assignment import mini_batches
from hpc_rl.rl.rollout.engine import Completion


def new_experience(
    prompts: Sequence[NDArray[np.int32]], groups: Sequence[int], completions: Sequence[Completion]
) -> TensorDict:
    """Return the experience of new responses; completions[i] answers prompts[i], or a prompt of its own."""
    answered = [prompt if c.prompt is None else c.prompt for prompt, c in zip(prompts, completions, strict=True)]
    columns = {
        "prompt_ids": jagged_rows(answered),
        "response_ids": jagged_rows([c.token_ids for c in completions]),
        "rollout_logprobs": jagged_rows([c.logprobs if c.mask is None else c.logprobs[c.mask] for c in completions]),
        "group": torch.tensor(list(groups), dtype=torch.int64),
        "finished": torch.tensor([c.finished for c in completions]),
    }
    if any(c.mask is not None for c in completions):
        masks = [np.ones(len(c.token_ids), np.bool_) if c.mask is None else c.mask for c in completions]
        columns["response_mask"] = jagged_rows(masks)
    return TensorDict(columns, batch_size=[len(completions)])


def add_scores(
    experience: TensorDict, rewards_B: torch.Tensor, config: PpoConfig, greedy_scores_B: torch.Tensor | None = None
) -> None:
    """Add the columns `scores` and `scored`.

    Args:
        rewards_B: of each response; NaN if it could not be scored.
        greedy_scores_B: score of the greedy response to each response's prompt, for ReMax. If it is NaN, the response
            counts as not scored.
    """
    scores_B = scores_of(rewards_B, lengths(experience), config)
    experience["scored"] = ~scores_B.isnan()
    if greedy_scores_B is not None:
        experience["scored"] &= ~greedy_scores_B.isnan()
    experience["scores"] = scores_B.nan_to_num(0.0)


def scores_of(rewards_B: torch.Tensor, lengths_B: torch.Tensor, config: PpoConfig) -> torch.Tensor:
    """Return the rewards [B] minus the penalty for overlong responses; NaN stays NaN.

    Args:
        lengths_B: sampled tokens of each response.
    """
    algorithm = config.algorithm
    return rewards_B + overlong_penalty(
        lengths_B, config.data.max_response_length, algorithm.overlong_buffer, algorithm.overlong_penalty
    )


def add_rewards(experience: TensorDict, algorithm: AlgorithmConfig, kl_coef: float) -> float | None:
    """Add the column `rewards`.

    Returns:
        the mean divergence from the reference per response, in nats; None if it is not part of the reward.
    """
    lengths_B = lengths(experience)
    rewards_N, kl_mean = token_rewards(experience["scores"], lengths_B), None
    if algorithm.kl.where == "reward":
        estimator = KL_ESTIMATORS[algorithm.kl.estimator]
        kl_N = estimator(flat(experience, "old_logprobs"), flat(experience, "ref_logprobs"))
        rewards_N.sub_(kl_N, alpha=kl_coef)
        kl_mean = float(kl_N.sum()) / len(lengths_B)
    experience["rewards"] = jagged(rewards_N, lengths_B)
    return kl_mean


def add_advantages(
    experience: TensorDict,
    algorithm: AlgorithmConfig,
    greedy_scores_B: torch.Tensor | None,
    teacher_coeff: float = 1.0,
) -> None:
    """Add the column `advantages` and, with a critic, `returns`.

    Responses without a score have advantages and returns of 0, and do not change those of others. They have no weight
    in the losses.

    Args:
        greedy_scores_B: score of the greedy response to each response's prompt; ReMax needs it.
        teacher_coeff: factor of the teacher's part, if there is a teacher.
    """
    scored_B, lengths_B = experience["scored"], lengths(experience)

    def column(name: str) -> torch.Tensor:
        return of_responses(flat(experience, name), scored_B, experience)

    teacher_N = None
    if "teacher_logprobs" in experience:
        teacher_N = opd(column("teacher_logprobs"), column("old_logprobs"), teacher_coeff)
    estimate = ESTIMATORS[algorithm.advantage](
        AdvantageInputs(
            rewards_N=column("rewards"),
            lengths_B=lengths_B[scored_B],
            groups_B=experience["group"][scored_B],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            scale=algorithm.scale_rewards,
            values_N=column("values") if "values" in experience else None,
            teacher_N=teacher_N,
            greedy_scores_B=None if greedy_scores_B is None else greedy_scores_B[scored_B],
        )
    )
    advantages_N = estimate.advantages_N
    if teacher_N is not None and algorithm.advantage != "opd":
        advantages_N = advantages_N + teacher_N
    for name, found_N in (("advantages", advantages_N), ("returns", estimate.returns_N)):
        if found_N is not None:
            experience[name] = jagged(with_zeros(found_N, scored_B, experience), lengths_B)


def loss_weights(
    experience: TensorDict, config: PpoConfig, aggregation: str, order: NDArray[np.int64] | None = None
) -> torch.Tensor:
    """Return a token column: the weight of each token in its mini-batch's loss.

    It is 0 in responses that teach nothing, which do not count in the totals either.

    Args:
        aggregation: a name in LOSS_AGGREGATIONS.
        order: order of the responses, [B], that is cut into mini-batches. Default: as they are.
    """
    lengths_B, teaches_B = lengths(experience), teaching(experience, config.algorithm)
    weights = LOSS_AGGREGATIONS[aggregation]
    weights_B = torch.empty(len(lengths_B))
    ordered = torch.arange(len(lengths_B)) if order is None else torch.from_numpy(order)
    for part in mini_batches(len(lengths_B), config.actor.mini_batch_size):
        rows = ordered[part]
        teaches, mine = teaches_B[rows], lengths_B[rows]
        tokens, responses = int(mine[teaches].sum()), int(teaches.sum())
        totals = MiniBatchTotals(max(tokens, 1), max(responses, 1), config.data.max_response_length)
        weights_B[rows] = weights(mine, totals) * teaches
    return repeat(weights_B, experience)


def teaching(experience: TensorDict, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return bool [B]: whether the response takes part in the losses."""
    scored_B: torch.Tensor = experience["scored"]
    return scored_B & experience["finished"] if algorithm.mask_truncated else scored_B


def importance_weights(experience: TensorDict, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return a token column: weights that correct for the difference between engine and trainer."""
    ratios_N = trainer_ratios(experience, algorithm)
    return jagged(correction_weights(ratios_N, algorithm.tis_cap, algorithm.tis_bounds), lengths(experience))


def trainer_ratios(experience: TensorDict, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return p of the trainer / p of the engine at each token, [N]; see importance_ratios."""
    old_N, rollout_N = (flat(experience, name) for name in ("old_logprobs", "rollout_logprobs"))
    return importance_ratios(old_N, rollout_N, lengths(experience), algorithm.tis_level)


def jagged_rows(rows: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    """Return a jagged column from one array per response."""
    lengths = torch.tensor([len(row) for row in rows])
    return jagged(torch.from_numpy(np.concatenate(rows)), lengths)


def rows_of(column: torch.Tensor) -> list[NDArray[Any]]:
    """Return the rows of a jagged column, which share its memory."""
    values_N = column.values().numpy()
    return [values_N[start:end] for start, end in pairwise(column.offsets().tolist())]


def jagged(values_N: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return a jagged column from the tokens of all responses, concatenated."""
    offsets = torch.zeros(len(lengths_B) + 1, dtype=torch.int64)
    torch.cumsum(lengths_B, 0, out=offsets[1:])
    column: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values_N, offsets, min_seqlen=int(lengths_B.min()), max_seqlen=int(lengths_B.max())
    )
    return column


def joined(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a jagged column with the rows of all columns."""
    lengths_B = torch.cat([column.offsets().diff() for column in columns])
    return jagged(torch.cat([column.values() for column in columns]), lengths_B)


def lengths(experience: TensorDict, column: str = "rollout_logprobs") -> torch.Tensor:
    """Return the length of each row of a jagged column, int64 [B]; by default of the columns marked "tokens"."""
    offsets: torch.Tensor = experience[column].offsets().diff()
    return offsets


def all_lengths(experience: TensorDict) -> torch.Tensor:
    """Return the number of tokens that a model computes for each response, with its prompt and observations: [B]."""
    return lengths(experience, "prompt_ids") + lengths(experience, "response_ids")


def flat(experience: TensorDict, column: str) -> torch.Tensor:
    """Return a token column with all responses concatenated: [N]."""
    values: torch.Tensor = experience[column].values()
    return values


def repeat(values_B: torch.Tensor, experience: TensorDict) -> torch.Tensor:
    """Return a token column in which each token has its response's value."""
    lengths_B = lengths(experience)
    return jagged(to_tokens(values_B, lengths_B), lengths_B)


def sums(experience: TensorDict, column: str) -> torch.Tensor:
    """Return the sum of a token column over each response: [B]."""
    return total_of_each(flat(experience, column), lengths(experience))


def of_responses(values_N: torch.Tensor, chosen_B: torch.Tensor, experience: TensorDict) -> torch.Tensor:
    """Return the tokens of the responses that are chosen (bool [B]). All tokens are returned without a copy."""
    return values_N if bool(chosen_B.all()) else values_N[repeat(chosen_B, experience).values()]


def with_zeros(values_N: torch.Tensor, chosen_B: torch.Tensor, experience: TensorDict) -> torch.Tensor:
    """Return the tokens of all responses: those that `of_responses` chooses have these values, the others 0."""
    if bool(chosen_B.all()):
        return values_N
    chosen_N = repeat(chosen_B, experience).values()
    return values_N.new_zeros(len(chosen_N)).masked_scatter_(chosen_N, values_N)
