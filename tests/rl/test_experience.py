from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hpc_rl.rl import experience as columns
from hpc_rl.rl.rollout.engine import Completion

no_deadline = settings(deadline=None)
all_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def experience_of(responses: list[int], prompts: list[int] | None = None) -> TensorDict:
    """Token n of all has the log-probability -n."""
    prompts = prompts or [2] * len(responses)
    starts = np.cumsum([0, *responses[:-1]])
    completions = [
        Completion(
            np.arange(start, start + length, dtype=np.int32),
            -np.arange(start, start + length, dtype=np.float32),
            finished=length < 6,
        )
        for start, length in zip(starts, responses, strict=True)
    ]
    asked = [np.full(length, 7, np.int32) for length in prompts]
    return columns.new_experience(asked, range(len(responses)), completions)


@no_deadline
@given(all_lengths)
def test_padded_and_back(lengths: list[int]) -> None:
    experience = experience_of(lengths)
    padded_BT = columns.padded(experience, "rollout_logprobs")
    mask_BT = columns.mask(experience)
    assert padded_BT.shape == mask_BT.shape == (len(lengths), max(lengths))
    assert mask_BT.sum(dim=1).tolist() == lengths
    assert (padded_BT[~mask_BT] == 0).all()
    again = columns.unpadded(padded_BT, experience)
    assert torch.equal(again.values(), columns.flat(experience, "rollout_logprobs"))
    assert torch.equal(again.offsets(), experience["response_ids"].offsets())


@no_deadline
@given(all_lengths)
def test_flat_columns_are_jagged_again(lengths: list[int]) -> None:
    experience = experience_of(lengths)
    values_N = torch.arange(sum(lengths), dtype=torch.float32)
    experience["values"] = columns.jagged(values_N, columns.lengths(experience))
    assert [row.tolist() for row in experience["values"].unbind()] == [
        part.tolist() for part in values_N.split(lengths)
    ]
    assert torch.equal(columns.flat(experience, "values"), values_N)


@no_deadline
@given(all_lengths)
def test_a_number_per_response_at_each_of_its_tokens(lengths: list[int]) -> None:
    experience = experience_of(lengths)
    column = columns.repeat(torch.arange(len(lengths)).float(), experience)
    assert column.values().tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]


def test_what_a_new_experience_has() -> None:
    experience = experience_of([3, 6], prompts=[4, 1])
    assert set(experience.keys()) == {"prompt_ids", "response_ids", "rollout_logprobs", "group", "finished"}
    assert experience.batch_size == torch.Size([2])
    assert columns.lengths(experience).tolist() == [3, 6]
    assert columns.lengths(experience, "prompt_ids").tolist() == [4, 1]
    assert experience["finished"].tolist() == [True, False]
    assert [row.tolist() for row in experience["response_ids"].unbind()] == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    assert {name: str(experience[name].dtype) for name in experience.keys()} == {  # noqa: SIM118 - iterating gives rows
        "prompt_ids": "torch.int32",
        "response_ids": "torch.int32",
        "rollout_logprobs": "torch.float32",
        "group": "torch.int64",
        "finished": "torch.bool",
    }
