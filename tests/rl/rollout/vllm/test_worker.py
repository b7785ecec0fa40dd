from __future__ import annotations

from typing import Any

import torch

from hpc_rl.rl.rollout.vllm.worker import track_loading
from tests.rl.rollout.vllm.test_engine import needs_vllm


@needs_vllm
def test_loading_is_tracked_by_name() -> None:
    """One set for each update; a model that does not return names counts as complete."""

    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> Any:
            return {name for name, _ in weights} if self.out_features == 3 else None

    model: Any = Model(2, 3)
    first = track_loading(model, {"weight", "bias", "computed"})
    assert first == {"weight", "bias"}
    assert model.load_weights([("weight", None)]) == {"weight"} and first == {"bias"}
    second = track_loading(model, {"weight", "bias", "computed"})
    model.load_weights([("bias", None)])
    assert (first, second) == ({"bias"}, {"weight"})
    silent: Any = Model(2, 4)
    missing = track_loading(silent, {"weight"})
    silent.load_weights([])
    assert not missing
