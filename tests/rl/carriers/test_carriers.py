from __future__ import annotations

import pickle
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hpc_rl.rl.carriers.base import ColumnHandle, DirectSink, shards_of
from hpc_rl.rl.carriers.through_ray import RayCarrier
from hpc_rl.rl.carriers.transfer_queue.carrier import TransferQueueCarrier
from hpc_rl.rl.loop.assignment import Assignment, assign_responses
from hpc_rl.rl.loop.experience import flat, jagged, jagged_rows
from tests.rl.ppo_config import ppo_config


def experience() -> tuple[TensorDict, Assignment]:
    prompts = [np.arange(n, dtype=np.int32) for n in (3, 1, 2)]
    responses = [np.arange(n, dtype=np.int32) + 10 for n in (2, 4, 1)]
    columns = {"prompt_ids": jagged_rows(prompts), "response_ids": jagged_rows(responses)}
    assignment = assign_responses(np.array([5, 5, 3]), np.array([2, 4, 1]), None, 2, 8)
    return TensorDict(columns, batch_size=[3]), assignment


def test_calls_of_ray_contain_shards_and_columns() -> None:
    step, assignment = experience()
    parcels = RayCarrier().shards(step, assignment)
    for parcel, expected in zip(parcels, shards_of(step, assignment), strict=True):
        np.testing.assert_array_equal(parcel.open().tokens, expected.tokens)
        assert parcel.open().mini_batches == expected.mini_batches
    column = jagged(torch.arange(7.0), torch.tensor([2, 4, 1]))
    parts = [parcel.open()["advantages"] for parcel in RayCarrier().columns(assignment, {"advantages": column})]
    np.testing.assert_array_equal(assignment.join(parts), np.arange(7.0))
    assert RayCarrier().kept(assignment, torch.tensor([2, 4, 1])) is None
    np.testing.assert_array_equal(DirectSink().send(parts[0]), parts[0])


def test_the_option_selects_the_carrier() -> None:
    chosen = [ppo_config(f"transfer_queue.enable={enable}").carrier_spec.carrier for enable in ("false", "true")]
    assert [*map(resolve_name, chosen)] == [RayCarrier, TransferQueueCarrier]


def test_a_column_that_stays_with_the_carrier_cannot_be_read() -> None:
    step, _ = experience()
    step["old_logprobs"] = ColumnHandle("kept-1")
    assert step["old_logprobs"] == pickle.loads(pickle.dumps(ColumnHandle("kept-1")))
    with pytest.raises(AttributeError, match="stays with the carrier: add the column to `needed_by_driver`"):
        flat(step, "old_logprobs")
