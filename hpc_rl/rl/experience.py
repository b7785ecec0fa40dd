"""One step's responses as a TensorDict, from generation to the last update.

B responses; columns marked "tokens" are jagged, [B, length of each response], so that nothing is padded:

    prompt_ids      jagged   int32    [B, P]
    response_ids    tokens   int32    end-of-sequence token included
    group           [B]      int64    which prompt of the step a response answers
    finished        [B]      bool     ended by itself, rather than cut at the limit
    rollout_logprobs tokens  float32  of the engine that sampled, at rollout.temperature
    scores          [B]      float32  what the reward says of the whole response, penalties included
    old_logprobs    tokens   float32  of the policy before the step's first update
    ref_logprobs    tokens   float32  of the reference
    values          tokens   float32  the critic's, of the state before each token
    rewards         tokens   float32  score at the last token, less the KL penalty where it is part of the reward
    advantages      tokens   float32
    returns         tokens   float32  what the critic should have said
    weights         tokens   float32  share of each token's loss in its mini-batch's loss; sums over ranks

Columns appear as the loop computes them; those that an algorithm does not need never do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.rl.rollout.engine import Completion


def new_experience(
    prompts: Sequence[NDArray[np.int32]], groups: Sequence[int], completions: Sequence[Completion]
) -> TensorDict:
    """The experience of freshly generated responses: prompts[i] was answered by completions[i]."""
    columns = {
        "prompt_ids": jagged_rows(list(prompts)),
        "response_ids": jagged_rows([c.token_ids for c in completions]),
        "rollout_logprobs": jagged_rows([c.logprobs for c in completions]),
        "group": torch.tensor(list(groups), dtype=torch.int64),
        "finished": torch.tensor([c.finished for c in completions]),
    }
    return TensorDict(columns, batch_size=[len(completions)])


def jagged_rows(rows: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    """A jagged column from one array per response."""
    lengths = torch.tensor([len(row) for row in rows])
    return jagged(torch.from_numpy(np.concatenate(rows)), lengths)


def jagged(values_N: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """A jagged column from the tokens of all responses, laid end to end."""
    offsets = torch.zeros(len(lengths_B) + 1, dtype=torch.int64)
    torch.cumsum(lengths_B, 0, out=offsets[1:])
    column: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values_N, offsets, min_seqlen=int(lengths_B.min()), max_seqlen=int(lengths_B.max())
    )
    return column


def lengths(experience: TensorDict, column: str = "response_ids") -> torch.Tensor:
    """Tokens of each response (or prompt): int64 [B]."""
    offsets: torch.Tensor = experience[column].offsets().diff()
    return offsets


def flat(experience: TensorDict, column: str) -> torch.Tensor:
    """A token column with all responses end to end: [N]."""
    values: torch.Tensor = experience[column].values()
    return values


def padded(experience: TensorDict, column: str) -> torch.Tensor:
    """A token column as [B, T] with zeros after each response's end; T is the longest response."""
    return torch.nested.to_padded_tensor(experience[column], 0)


def mask(experience: TensorDict) -> torch.Tensor:
    """bool [B, T]: true where `padded` has a token."""
    lengths_B = lengths(experience)
    return torch.arange(int(lengths_B.max()))[None] < lengths_B[:, None]


def unpadded(values_BT: torch.Tensor, experience: TensorDict) -> torch.Tensor:
    """The inverse of `padded`: a token column."""
    return jagged(values_BT[mask(experience)], lengths(experience))


def repeat(values_B: torch.Tensor, experience: TensorDict) -> torch.Tensor:
    """A token column in which each token has its response's value."""
    lengths_B = lengths(experience)
    return jagged(values_B.repeat_interleave(lengths_B), lengths_B)
