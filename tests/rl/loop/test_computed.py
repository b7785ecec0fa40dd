"""Which computations start when; a stand-in for workers returns the first token of each response."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop.computed import Computation, ComputedColumns
from hpc_rl.rl.loop.experience import jagged, lengths
from hpc_rl.rl.rollout.engine import Completion

PROMPTS = [Prompt(np.array([i, i], np.int32), str(i), {}, "") for i in range(7)]
COMPLETIONS = [
    Completion(np.full(1 + i % 3, 10 + i, np.int32), np.zeros(1 + i % 3, np.float32), True) for i in range(7)
]
GROUPS = list(range(7))


class Workers:
    def __init__(self) -> None:
        self.did: list[Any] = []

    def column_of(self, method: str, experience: TensorDict) -> Pending[torch.Tensor]:
        prompts = experience["prompt_ids"].values()[::2].tolist()
        self.did.append((method, prompts))
        return Pending.known(jagged(experience["response_ids"].values().float(), lengths(experience, "response_ids")))

    def column(self, method: str) -> Pending[Any]:
        self.did.append((method, "held"))
        return Pending.known(method)

    def keep(self, method: str) -> Pending[Any]:
        self.did.append((method, "kept"))
        return Pending.known(method)


def begin(columns: ComputedColumns, responses: int) -> None:
    columns.begin(PROMPTS[:responses], GROUPS[:responses], COMPLETIONS[:responses])


def test_each_mini_batch_starts_once_as_soon_as_it_is_complete() -> None:
    workers, others = Workers(), Workers()
    computations = {
        "old_logprobs": Computation(workers, "logprobs", is_early=True),  # type: ignore[arg-type]
        "ref_logprobs": Computation(others, "ref_logprobs", stays=True),  # type: ignore[arg-type]
        "values": Computation(workers, "values", is_early=True, stays=True),  # type: ignore[arg-type]
        "teacher_logprobs": Computation(others, "teacher_logprobs"),  # type: ignore[arg-type]
    }
    columns = ComputedColumns(computations, responses=7, mini_batch_size=3)
    for step in range(2):
        workers.did.clear()
        others.did.clear()
        for count, begun in ((0, 0), (2, 0), (3, 1), (5, 1), (6, 2), (7, 3), (7, 3)):
            begin(columns, count)
            parts = [[0, 1, 2], [3, 4, 5], [6]][:begun]
            assert columns.awaits == (3, 6, 7, None)[begun]
            assert workers.did == [(method, part) for part in parts for method in ("logprobs", "values")], step
        assert not others.did
        found = {name: pending.wait() for name, pending in columns.take().items()}
        assert list(found) == ["old_logprobs", "ref_logprobs", "values", "teacher_logprobs"]
        assert others.did == [("ref_logprobs", "kept"), ("teacher_logprobs", "held")] and len(workers.did) == 6
        expected = [10 + i for i in range(7) for _ in range(1 + i % 3)]
        for name in ("old_logprobs", "values"):
            assert found[name].values().tolist() == expected
            assert found[name].offsets().diff().tolist() == [1 + i % 3 for i in range(7)]


def test_nothing_starts_early_without_early_columns() -> None:
    workers = Workers()
    columns = ComputedColumns({"values": Computation(workers, "values")}, 7, None)  # type: ignore[arg-type]
    assert columns.awaits is None
    begin(columns, 7)
    assert workers.did == []
    assert columns.take()["values"].wait() == "values" and workers.did == [("values", "held")]
    assert ComputedColumns({}, 7, 3).take() == {}
